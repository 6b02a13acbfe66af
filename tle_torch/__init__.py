"""tle_torch: Hugging Face models on the CPU, as fast as its memory delivers weights.

    import tle_torch
    report = tle_torch.patch_model(model)      # any loaded transformers model
    model.generate(**inputs)                   # as before
"""

from tle_torch import ops  # loads the operators torch.ops.tle.*
from tle_torch.cache import Cache
from tle_torch.gguf import from_gguf
from tle_torch.patcher import disabled, patch_model, unpatch_model
from tle_torch.report import Report
from tle_torch.threads import cpu_info, get_num_threads, set_num_threads
from tle_torch.verify import verify
from tle_torch.weights import schemes

__all__ = [
    "Cache",
    "Report",
    "cpu_info",
    "disabled",
    "from_gguf",
    "get_num_threads",
    "ops",
    "patch_model",
    "schemes",
    "set_num_threads",
    "unpatch_model",
    "verify",
]
__version__ = "0.1.0"
