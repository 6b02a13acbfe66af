"""Whether a module's call is its forward and nothing else."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["has_global_hooks", "has_user_hooks", "is_capture_hook"]


def has_global_hooks() -> bool:
    """Whether somebody wants to see the calls of all modules."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def has_user_hooks(module: nn.Module) -> bool:
    """Whether calling `module` does more than its forward: a forward hook of a user, or a forward put on the instance
    (as accelerate does). transformers' own output-capture hooks, which stay behind after one
    `output_hidden_states=True`, do not count: they do nothing unless that was asked for again."""
    if module._forward_pre_hooks or "forward" in module.__dict__:
        return True
    return any(not is_capture_hook(hook) for hook in module._forward_hooks.values())


def is_capture_hook(hook) -> bool:
    """Whether a forward hook is one of transformers' output-capture hooks."""
    return (
        getattr(hook, "__module__", None) == "transformers.utils.output_capturing"
        and getattr(hook, "__qualname__", "") == "install_output_capuring_hook.<locals>.output_capturing_hook"
    )
