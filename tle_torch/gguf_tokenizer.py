"""Tokenizers from the metadata of GGUF files."""

from __future__ import annotations

from tokenizers import Tokenizer
from transformers import TOKENIZER_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase, TokenizersBackend
from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

from tle_torch.gguf_file import GgufFile, Strings

__all__ = ["tokenizer_of"]

_TOKENS = "tokenizer.ggml.tokens"
# Special tokens of a tokenizer by the name of their id in the metadata.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCEPIECE = "llama"


def tokenizer_of(file: GgufFile, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a file: what `AutoTokenizer.from_pretrained(folder, gguf_file=name)` makes.

    transformers' own conversion does the work, on metadata that were read once. Reading is what takes that call its
    seconds: it parses the file three times, and for most architectures once more with the gguf package, only to find
    the class of the tokenizer. It also prefers a tokenizer.json that lies beside the file, which may be another
    model's; this does not.

    Args:
        file: the open file.
        config: of the file's model; decides the class.

    Raises:
        ValueError: the file has no tokenizer, one of an unknown kind, or special tokens outside its vocabulary.
    """
    backend, options = _backend_of(file)
    cls = TOKENIZER_MAPPING.get(type(config), None)
    if cls is None or not issubclass(cls, TokenizersBackend):
        cls = TokenizersBackend
    return cls(tokenizer_object=_AsItIs(backend), name_or_path=str(file.path.parent), **options)


def _backend_of(file: GgufFile) -> tuple[Tokenizer, dict[str, object]]:
    """The tokenizer and the options of its Python side. The vocabulary as Python's strings lives in here only: nothing
    that stays is made meanwhile, so that their memory becomes free in one piece."""
    metadata, name = file.metadata, file.path.name
    groups = {
        group: {
            ours: metadata[f"tokenizer.{theirs}"] for theirs, ours in names.items() if f"tokenizer.{theirs}" in metadata
        }
        for group, names in GGUF_TOKENIZER_MAPPING.items()
    }
    description, options = groups["tokenizer"], groups["tokenizer_config"]
    description = {key: list(value) if isinstance(value, Strings) else value for key, value in description.items()}
    tokens, kind = description.get("tokens"), description.get("tokenizer_type")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ValueError(f"{name}: the file has no tokenizer ({_TOKENS})")
    if kind == _SENTENCEPIECE:
        options.setdefault("add_bos_token", True)  # files from before the flag
    for option, key in _SPECIAL.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and not (isinstance(index, int) and 0 <= index < len(tokens)):
            raise ValueError(f"{name}: the {key} token is number {index!r} of a vocabulary of {len(tokens)}")
        options[option] = None if index is None else tokens[index]
    try:
        backend, more = convert_gguf_tokenizer(file.architecture, description)
    except Exception as error:
        # Whatever: from metadata that are damaged come the tokenizers package's own types too, over several lines.
        reason = " ".join(str(error).split())
        raise ValueError(f"{name}: transformers cannot build its tokenizer (of kind {kind!r}): {reason}") from error
    return backend, {**options, **more}


class _AsItIs:
    """Stands for a tokenizer where transformers makes a deep copy: what comes out is the tokenizer itself. A copy takes
    a third of the time that the whole tokenizer takes, and leaves the heap in pieces."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict) -> Tokenizer:
        return self._tokenizer
