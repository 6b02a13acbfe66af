"""generate()'s sampling loop, lean.

Outside the layers, transformers spends about a millisecond of Python on every token: it rebuilds the model's inputs,
inspects signatures, concatenates masks and positions, and wraps outputs in dataclasses. A small model's whole step
takes a few times that. This loop does greedy search and sampling for the common case and keeps what carries meaning:
processors, criteria, streamers and the random numbers are the same, called in the same order with the same values, so
the tokens are the same. Anything else (recorded outputs, a foreign cache, a model that prepares its inputs in its own
way, ...) is left to transformers' loop.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import TextIteratorStreamer, TextStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from tle_torch.attention import left_padding
from tle_torch.cache import Cache
from tle_torch.hooks import has_user_hooks
from tle_torch.sampling import draw, faster

if TYPE_CHECKING:
    from tle_torch.decode import StepPlan, TokenPlan, TokenStretch

__all__ = ["SampleLoop", "logits_are_plain"]

# A model that overrides one of these, in its class or by itself, does something between two tokens that the lean loop
# would miss.
_PLAIN_METHODS = (
    "_prefill",
    "_has_unfinished_sequences",
    "_optimize_model_for_decode",
    "_update_model_kwargs_for_generation",
    "_valid_auto_compile_criteria",
    "prepare_inputs_for_generation",
)
# Processors that compute from tokens and scores alone.
_ARITHMETIC = frozenset(
    {
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.MinPLogitsWarper,
        logits_process.NoRepeatNGramLogitsProcessor,
        logits_process.RepetitionPenaltyLogitsProcessor,
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.TypicalLogitsWarper,
    }
)
_KNOWN_INPUTS = frozenset(
    {"attention_mask", "inputs_embeds", "logits_to_keep", "past_key_values", "position_ids", "use_cache"}
)
# Streamers that pass text on and touch no model; a subclass may do anything.
_PRINTERS = frozenset({TextStreamer, TextIteratorStreamer})
# Tokens that one call may make.
_STRETCH = 32
# What would have to be recorded at every step.
_RECORDS = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")

# Models whose logits were proven to be head(decoder(tokens)), with the forward for which that was proven.
_proven: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()


def _is_plain(model: nn.Module) -> bool:
    """Whether everything that transformers' loop would call of a patched causal model is transformers' own."""
    cls = type(model).__tle_base__
    return (
        cls._sample is GenerationMixin._sample
        and cls.__call__ is nn.Module.__call__
        and cls.forward.__module__.startswith("transformers.")
        and all(getattr(cls, name) is getattr(GenerationMixin, name) for name in _PLAIN_METHODS)
        and vars(model).keys().isdisjoint(_PLAIN_METHODS)
    )


def logits_are_plain(model: nn.Module) -> bool:
    """Whether a causal model's logits are its head applied to its decoder's output, proven once per model by running a
    token both ways. A hook would see those runs: while the head or the embedding has one, nothing new is proven."""
    forward = type(model).forward
    if _proven.get(model) is not forward:
        head, decoder = model.get_output_embeddings(), model.base_model
        if any(has_user_hooks(m) for part in (head, decoder.get_input_embeddings()) for m in part.modules()):
            return False
        token = torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            wanted = model(input_ids=token, past_key_values=Cache(), use_cache=True).logits
            got = head(decoder(input_ids=token, past_key_values=Cache(), use_cache=True).last_hidden_state)
        if got.dtype != wanted.dtype or not torch.equal(got, wanted):
            return False
        _proven[model] = forward
    return True


class SampleLoop:
    """One call of generate() in its sampling (or greedy) mode."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config,
        synced_gpus: bool,
        streamer,
        inputs: dict[str, object],
    ) -> SampleLoop | None:
        """The loop for these arguments of `GenerationMixin._sample`, or None if they need transformers' own."""
        router = getattr(model.base_model, "tle_router", None)
        if (
            router is None
            or synced_gpus
            or model.base_model is model
            or any(getattr(config, name) for name in _RECORDS)
            or config.compile_config is not None
            or type(inputs.get("past_key_values")) is not Cache
            or inputs.get("use_cache") is not True
            or any(value is not None and name not in _KNOWN_INPUTS for name, value in inputs.items())
            or inputs.get("logits_to_keep", 1) != 1
            or type(processors) is not LogitsProcessorList
            or type(criteria) is not StoppingCriteriaList
            or not _is_plain(model)
            or router.usable_plan(model.base_model, {}) is None
            or not isinstance(model.get_output_embeddings(), nn.Linear)
        ):
            return None
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.is_floating_point():
            return None
        starts = None if mask is None else left_padding(mask, mask.shape[-1])
        if starts is False or has_user_hooks(model) or has_user_hooks(model.base_model) or not logits_are_plain(model):
            return None
        steps = [_plain_processor(processor) for processor in processors]
        if None in steps:
            return None
        return cls(model, router, input_ids, steps, criteria, config, streamer, inputs, starts)

    def __init__(self, model, router, input_ids, processors, criteria, config, streamer, inputs, starts):
        self.model, self.decoder, self.router = model, model.base_model, router
        self.processors, self.criteria, self.config, self.streamer = processors, criteria, config, streamer
        self.inputs, self.starts = inputs, starts
        self.cache: Cache = inputs["past_key_values"]
        self.mask: torch.Tensor | None = inputs.get("attention_mask")
        self.position = inputs["position_ids"][:, -1:].to(torch.long, copy=True)
        self.prompt = input_ids
        self.batch, self.length = input_ids.shape
        # Sequences so far [batch, length], in a buffer that grows in large steps.
        self.buffer = input_ids.long()
        # Criteria that are a comparison are compared; `others` means that there are more, and all are called.
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=math.inf)
        self.reminder = min(
            (c.max_position_embeddings for c in criteria if type(c) is MaxLengthCriteria and c.max_position_embeddings),
            default=math.inf,
        )
        ends = [c.eos_token_id.view(-1) for c in criteria if type(c) is EosTokenCriteria]
        self.ends = torch.cat(ends).long() if ends else None
        self.others = any(type(c) not in (MaxLengthCriteria, EosTokenCriteria) for c in criteria)
        # Whether nothing but this loop and transformers' own code runs between two tokens: then nobody can have changed
        # the model.
        self.quiet = (
            (streamer is None or type(streamer) in _PRINTERS)
            and not self.others
            and all(_is_arithmetic(p) for p in processors)
        )
        self._plan = None
        self._tokens: TokenPlan | None = None
        self._stretch: TokenStretch | None = None
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)

    def run(self):
        """What `GenerationMixin._sample` returns."""
        outputs = self.model._prefill(
            self.prompt, self.config, self.inputs, is_first_iteration=not self.config.is_assistant
        )
        logits = outputs.logits[:, -1].clone()
        del outputs  # the prompt's logits may be large
        unfinished = torch.ones(self.batch, dtype=torch.long, device=self.prompt.device)
        # Whether several tokens may come at once.
        greedy = self.quiet and self.batch == 1 and not self.processors and not self.config.do_sample
        greedy = greedy and self.streamer is None
        while True:
            tokens = self._choose(logits)
            if self.pads and (self.batch > 1):
                tokens = tokens * unfinished + self.config._pad_token_tensor * (1 - unfinished)
            self._append(tokens.unsqueeze(1))
            finished = self._finished(tokens, unfinished)
            if self.streamer is not None:
                self.streamer.put(tokens.cpu())
            while greedy and not finished and self._token_plan() is not None:
                tokens = self._go_on(tokens)
                finished = self._finished(tokens, unfinished)
            if finished:
                break
            logits = self._step(tokens.unsqueeze(1))
        if self.streamer is not None:
            self.streamer.end()
        sequences = self._sequences().clone()
        if self.config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=self.cache)
        return sequences

    def _sequences(self) -> torch.Tensor:
        return self.buffer[:, : self.length]

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row, [batch]."""
        sampling = self.config.do_sample
        if not self.processors and not sampling:
            return torch.ops.tle.argmax(logits)
        scores = logits.to(torch.float32, copy=True)
        sequences = self._sequences()
        for process in self.processors:
            scores = process(sequences, scores)
        if sampling:
            return draw(nn.functional.softmax(scores, dim=-1)).squeeze(1)
        return torch.ops.tle.argmax(scores)

    def _append(self, tokens: torch.Tensor) -> None:
        """Adds tokens [batch, n] to the sequences."""
        end = self.length + tokens.shape[1]
        if end > self.buffer.shape[1]:
            wider = self.buffer.new_empty(self.batch, 2 * end + 64)
            wider[:, : self.length] = self._sequences()
            self.buffer = wider
        self.buffer[:, self.length : end] = tokens
        self.length = end

    def _finished(self, tokens: torch.Tensor, unfinished: torch.Tensor) -> bool:
        """Updates `unfinished` in place; True once no row is."""
        if self.others or self.length > self.reminder:
            unfinished &= ~self.criteria(self._sequences(), None)
        elif self.length >= self.max_length:
            return True
        elif self.ends is None:
            return False
        elif self.batch == 1:
            return bool((tokens == self.ends).any())
        else:
            unfinished &= ~torch.isin(tokens, self.ends)
        return not bool(unfinished.any())

    def _token_plan(self) -> TokenPlan | None:
        """How whole tokens run in one call while nobody else runs. Made once: nobody can change the model then."""
        if not self.quiet or not (self.starts is None or self.mask.shape[1] <= self.cache.get_seq_length()):
            return None
        if self._tokens is None and self._plan is None:
            self._plan = self._usable_plan()
            self._tokens = None if self._plan is None else self._plan.token_plan(self.model)
        return self._tokens

    def _usable_plan(self) -> StepPlan | None:
        if has_user_hooks(self.model) or has_user_hooks(self.decoder):
            return None
        return self.router.usable_plan(self.decoder, {})

    def _room_for(self, steps: int) -> TokenStretch:
        """The stretch at hand, or a new one where the cache must grow."""
        if self._stretch is None or self._stretch.room < steps:
            self._stretch = None  # holds the slots that the cache may grow out of
            self._stretch = self._tokens.stretch(self.batch, self.position + 1, self.cache, self.starts, steps)
        return self._stretch

    def _go_on(self, token: torch.Tensor) -> torch.Tensor:
        """Appends some of the tokens that greedy search finds after `token` [1], and returns the last of them."""
        # To the next length at which somebody has something to say; the rest bounds what the cache must have room for.
        limit = min(self.max_length, max(self.reminder, self.length + 1), self.length + _STRETCH)
        count = int(limit) - self.length
        found = self._room_for(count).greedy(token, count, self.ends)
        self.position += len(found)
        self._append(found.unsqueeze(0))
        return found[-1:]

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits [batch, V] after `tokens` [batch, 1]."""
        model, decoder, cache = self.model, self.decoder, self.cache
        if self._token_plan() is not None:
            logits = self._room_for(1).logits(tokens.squeeze(1))
            self.position += 1
            return logits
        self.position += 1
        plan = self._plan if self.quiet else None
        if plan is None:
            plan = self._plan = self._usable_plan()
        if plan is not None and (self.starts is None or self.mask.shape[1] <= cache.get_seq_length()):
            hidden = decoder.get_input_embeddings()(tokens)
            return model.get_output_embeddings()(plan.run(decoder, hidden, self.position, cache, self.starts))[:, -1]
        # Somebody (a streamer, a criterion) put a hook on while we were running: the ordinary way sees it.
        mask = self.mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(self.batch, cache.get_seq_length() + 1 - mask.shape[1])], dim=-1)
        outputs = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=self.position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return outputs.logits[:, -1]


def _is_arithmetic(step: Callable) -> bool:
    """Whether a step of `_plain_processor` runs no code of a user."""
    return type(step) in _ARITHMETIC or getattr(step, "__module__", None) in (__name__, faster.__module__)


def _plain_processor(processor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """A processor as a function of (sequences, scores), or None if it wants more than that."""
    if type(processor) is MinLengthLogitsProcessor:
        return _without_end(processor.eos_token_id, processor.min_length)
    if type(processor) is MinNewTokensLengthLogitsProcessor:
        return _without_end(processor.eos_token_id, processor.prompt_length_to_skip + processor.min_new_tokens)
    if (process := faster(processor)) is not None:
        return process
    return processor if len(inspect.signature(processor.__call__).parameters) == 2 else None


def _without_end(ends: torch.Tensor, length: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Forbids the end tokens while sequences are shorter than `length`; transformers looks every token of the
    vocabulary up for that, which costs more than the head of a small model."""

    def process(sequences: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(-1, ends, -math.inf) if sequences.shape[-1] < length else scores

    return process
