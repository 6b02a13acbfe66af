"""What patch_model did, and what it left alone and why."""

from __future__ import annotations

import io
import re
from dataclasses import asdict, dataclass, field

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

# What a scheme costs SmolLM2-135M-Instruct over 2,048 tokens (benchmarks/accuracy.py --reference float32): mean KL
# divergence in nats, share of the most likely tokens that change. A model's own cost is what `verify` measures.
EXPECTED_COST = {
    "w8a8": (0.0286, 0.105),
    "w8a8-a32": (0.0058, 0.053),
    "w8a8-g32": (0.0043, 0.050),
    "w4a8-g32": (0.2726, 0.282),
    "w8a8 with calibration": (0.0139, 0.083),
    "w8a8-a32 with calibration": (0.0046, 0.050),
    "w8a8-g32 with calibration": (0.0029, 0.043),
}

__all__ = ["LeftAlone", "Replaced", "Report", "Verification"]


@dataclass(frozen=True)
class Replaced:
    """A module that was patched. Bytes are those of its weights, before and after."""

    name: str
    kind: str
    original: str
    scheme: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class LeftAlone:
    """A module that was looked at and not patched, with the reason."""

    name: str
    original: str
    reason: str


@dataclass
class Report:
    """The result of `patch_model`. `str()` gives tables, `to_dict()` plain values.

    Attributes:
        scheme: the weights' scheme.
        replaced, left_alone: one entry per module.
        whole_step: per decoder (by name), None if its steps run in one call, else why they run module by module.
        notes: sentences about the model as a whole.
        isa, threads: the instruction-set level and thread count in force.
        calibration_tokens: how many the model was equalised by; 0: it was not.
        bytes_before, bytes_after: of all parameters and buffers of the model, counted once where shared.
    """

    scheme: str
    isa: str
    threads: int
    replaced: list[Replaced] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    whole_step: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    calibration_tokens: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def to_dict(self) -> dict:
        """All fields as plain Python values."""
        return asdict(self)

    def __rich__(self) -> Group:
        title = Text.assemble(
            ("tle_torch", "bold"),
            f": scheme {self.scheme}, {self.threads} thread{'s' * (self.threads != 1)}, {self.isa}; ",
            f"{_mib(self.bytes_before)} -> {_mib(self.bytes_after)}",
        )
        parts: list = [title]
        if self.replaced:
            parts.append(_table("Replaced", ("module", "was", "now", "count", "MiB before", "MiB after"), self._rows()))
        if self.left_alone:
            rows = _grouped(self.left_alone, lambda m: (m.original, m.reason))
            parts.append(
                _table(
                    "Left alone",
                    ("module", "is", "count", "why"),
                    [(names, original, str(len(items)), reason) for names, (original, reason), items in rows],
                )
            )
        for name, reason in self.whole_step.items():
            how = "one call" if reason is None else f"module by module, because {reason}"
            parts.append(Text(f"A step of {name or 'the model'} runs as {how}."))
        scheme = f"{self.scheme} with calibration" if self.calibration_tokens else self.scheme
        if scheme in EXPECTED_COST:
            kl, changed = EXPECTED_COST[scheme]
            parts.append(
                Text(
                    f"{scheme} costs SmolLM2-135M a mean KL divergence of {kl:.4f} nats and changes "
                    f"{changed:.1%} of its most likely tokens; tle_torch.verify measures it on this model."
                )
            )
        parts += [Text(note) for note in self.notes]
        return Group(*parts)

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for names, (kind, original, scheme), items in _grouped(
            self.replaced, lambda m: (m.kind, m.original, m.scheme)
        ):
            before, after = (sum(getattr(i, which) for i in items) for which in ("bytes_before", "bytes_after"))
            sizes = (f"{before / 2**20:.1f}", f"{after / 2**20:.1f}") if before or after else ("", "")
            rows.append((names, original, f"{kind} {scheme}".strip(), str(len(items)), *sizes))
        return rows

    def __str__(self) -> str:
        return _rendered(self)

    def __repr__(self) -> str:
        return (
            f"<Report: {len(self.replaced)} modules replaced, {len(self.left_alone)} left alone, scheme {self.scheme}>"
        )


@dataclass(frozen=True)
class Verification:
    """How far a patched model's logits are from the original's on the same inputs.

    Attributes:
        max_abs_error: largest absolute difference of a logit.
        mean_kl, max_kl: Kullback-Leibler divergence original || patched of the next-token distribution, in nats, over
            all positions that count.
        changed: share of positions whose most likely token differs.
        positions: how many positions were compared.
    """

    max_abs_error: float
    mean_kl: float
    max_kl: float
    changed: float
    positions: int

    def __str__(self) -> str:
        return (
            f"{self.positions} positions: mean KL {self.mean_kl:.2e} nats (max {self.max_kl:.2e}), most likely token "
            f"changed in {100 * self.changed:.1f} %, largest logit error {self.max_abs_error:.3g}"
        )


def _grouped(entries, key):
    """(name pattern, key, entries) per group of entries whose names differ in layer numbers only, in order."""
    groups: dict[tuple, list] = {}
    for entry in entries:
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", entry.name)
        groups.setdefault((pattern, key(entry)), []).append(entry)
    return [(pattern or "(the model)", fields, items) for (pattern, fields), items in groups.items()]


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = column.startswith("MiB") or column == "count"
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _rendered(renderable) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False, color_system=None)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
