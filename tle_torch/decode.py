"""A whole step of a decoder in one operator call.

Module by module, a token costs a small model more in Python and dispatch than in arithmetic. A `PatchedDecoder` looks
at each call of its forward: when nothing asks for what happens inside (hooks, adapters, recorded outputs, a foreign
cache, a mask of its own), it hands all layers to `fused_decode_step`, prefill and decode alike; otherwise its modules
run one by one, with the same bits.

What "nothing asks" means is checked at every call, because any of it can change between two tokens. Everything that
can be precomputed is: a `StepPlan` holds the weights in the operator's order, and what it was built from, in objects of
the extension that look at a few thousand pointers in some tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from tle_torch.attention import NAME as ATTENTION
from tle_torch.attention import left_padding
from tle_torch.cache import Cache
from tle_torch.families import Family, family_of
from tle_torch.hooks import has_global_hooks, has_user_hooks, is_capture_hook
from tle_torch.layers import (
    PackedEmbedding,
    PatchedMLP,
    PatchedNorm,
    PatchedPreTrainedModel,
    PatchedRotary,
    QuantizedLinear,
    is_plain_linear,
    linear_weight,
)
from tle_torch.ops import _C

__all__ = ["PatchedDecoder", "Router", "StepPlan", "TokenPlan", "self_check"]

_step = torch.ops.tle.planned_decode_step.default
_logits = torch.ops.tle.planned_logits.default
_greedy_steps = torch.ops.tle.planned_greedy_steps.default

# Arguments of a decoder's forward that change nothing inside the layers, whatever their value.
_HARMLESS = frozenset({"return_dict", "num_items_in_batch", "logits_to_keep", "labels"})


class NotFusable(Exception):
    """Why a decoder runs module by module; the message is a clause for the report."""


class StepPlan:
    """The operands of `fused_decode_step` for one decoder, and the means to see that they still hold.

    Attributes:
        refusal: None, or why this decoder cannot run in one call.
        weights: 18 per layer and the final norm's, in the order that schemas.cc gives.
    """

    def __init__(self, decoder: nn.Module, family: Family | None, forwards: dict[type, object]):
        self.refusal: str | None = None
        self.weights: list[torch.Tensor | None] = []
        self.layer_count = 0
        parts = [decoder]
        if family is not None:
            stack = getattr(decoder, family.layers, None)
            norm = getattr(decoder, family.final_norm, None)
            parts += [m for part in (stack, norm) if isinstance(part, nn.Module) for m in part.modules()]
        self._watch(parts)
        self._known_forwards = forwards
        try:
            if family is None:
                raise NotFusable("its decoder is of no known family")
            self._build(decoder, family)
        except NotFusable as error:
            self.refusal = str(error)
        self._watched = _C.Watch(self._contents, self._inner, self._instances, self._hook_free, self._settings)

    # ---- what may not change ----

    def _watch(self, parts: list[nn.Module]) -> None:
        """Remembers the parts' children, parameters and buffers, and where their hooks would appear."""
        # A module without children has none to be replaced (nobody adds one to a Linear), and a packed weight is the
        # only buffer.
        self._contents = [m._modules or m._parameters for m in parts]
        self._contents += [m._buffers for m in parts if isinstance(m, QuantizedLinear)]
        inner = parts[1:]
        self._inner = inner
        self._instances = [m.__dict__ for m in inner]
        hooks = [d for m in inner for d in (m._forward_hooks, m._forward_pre_hooks)]
        # Capture hooks that transformers left behind are known by their handles' ids, which are never used again.
        self._hook_free = [d for d in hooks if not d]
        self._hooked = [(d, tuple(d)) for d in hooks if d]
        self._foreign_hook = any(not is_capture_hook(hook) for d in hooks for hook in d.values())
        self._forwards = [(cls, cls.forward) for cls in {type(m) for m in inner}]
        self._settings: list[tuple[dict, str]] = []

    def is_current(self) -> bool:
        """Whether the decoder is made of the same objects as when the plan was built."""
        return (
            self._watched.unchanged()
            and all(tuple(d) == ids for d, ids in self._hooked)
            and all(cls.forward is forward for cls, forward in self._forwards)
        )

    def _watch_settings(self, owner: object, *names: str | None) -> None:
        """Remembers numbers that the operator is told: attributes of a module or a config that may be set anew."""
        attributes = vars(owner)
        self._settings += [(attributes, name) for name in names if name in attributes]

    # ---- building ----

    def _build(self, decoder: nn.Module, family: Family) -> None:
        if self._foreign_hook:
            raise NotFusable("a module inside has a hook")
        if any("forward" in instance for instance in self._instances):
            raise NotFusable("a module inside has a forward of its own")
        for cls, forward in self._forwards:
            if self._known_forwards.setdefault(cls, forward) is not forward:
                raise NotFusable(f"the forward of {cls.__name__} was replaced")
        if not isinstance(getattr(decoder, family.rotary, None), PatchedRotary):
            raise NotFusable(f"its {family.rotary} is not patched")
        layers = list(getattr(decoder, family.layers))
        if not layers:
            raise NotFusable("it has no layers")
        self._watch_settings(decoder.config, "sliding_window", "layer_types")
        common: dict[str, object] = {}

        def agree(**facts) -> None:
            for name, value in facts.items():
                if common.setdefault(name, value) != value:
                    raise NotFusable(f"its layers differ in {name.replace('_', ' ')}")

        rope, windows, attentions = [], [], []
        for index, layer in enumerate(layers):
            if not family.is_made_of(layer, "layer"):
                raise NotFusable(f"layer {index} is a {type(layer).__name__}")
            attention, mlp = getattr(layer, family.self_attention), getattr(layer, family.feed_forward)
            if not family.is_made_of(attention, "attention"):
                raise NotFusable(f"layer {index} has a {type(attention).__name__}")
            if not isinstance(mlp, PatchedMLP):
                raise NotFusable(f"the MLP of layer {index} is not patched")
            if not mlp.tle_knows_activation():
                raise NotFusable(f"the activation of layer {index} was replaced")
            if attention.layer_idx != index:
                raise NotFusable(f"layer {index} writes to cache layer {attention.layer_idx}")
            linears = [getattr(attention, name) for name in (family.q, family.k, family.v, family.o)]
            linears += [getattr(mlp, name) for name in (family.gate, family.up, family.down)]
            for linear in linears:
                if not is_plain_linear(linear):
                    raise NotFusable(f"layer {index} has a {type(linear).__name__} that is not patched")
            norms = [
                getattr(layer, family.input_norm),
                None if family.q_norm is None else getattr(attention, family.q_norm),
                None if family.k_norm is None else getattr(attention, family.k_norm),
                getattr(layer, family.post_norm),
            ]
            for norm in norms:
                if norm is not None:
                    agree(**self._norm_facts(norm))
            q, k, v, o, gate, up, down = linears
            head_dim = int(attention.head_dim)
            agree(
                head_size=head_dim,
                query_heads=q.out_features // head_dim,
                key_heads=k.out_features // head_dim,
                intermediate_size=gate.out_features,
                scaling=float(attention.scaling),
                dtype=norms[0].weight.dtype,
            )
            input_norm, q_norm, k_norm, post_norm = (None if n is None else n.weight for n in norms)
            self.weights += [input_norm, *_pair(q), *_pair(k), *_pair(v), q_norm, k_norm, *_pair(o), post_norm]
            self.weights += [*_pair(gate), *_pair(up), *_pair(down)]
            self._watch_settings(attention, "scaling", "head_dim", "attention_dropout", family.rotates)
            self._watch_settings(mlp, family.activation)
            rope.append(int(family.rotates_in(attention)))
            windows.append(family.window_of(attention))
            attentions.append(attention)
        final_norm = getattr(decoder, family.final_norm)
        agree(**self._norm_facts(final_norm), dtype=final_norm.weight.dtype)
        self.weights.append(final_norm.weight)
        self.layer_count = len(layers)
        self.rotary = family.rotary
        self.dtype = common["dtype"]
        self.key_heads, self.head_dim = common["key_heads"], common["head_size"]
        # A module in training mode applies dropout, if it has any.
        self.dropouts = [a for a in attentions if getattr(a, "attention_dropout", 0.0)]
        self.arguments = (
            common["query_heads"],
            common["key_heads"],
            common["head_size"],
            common["intermediate_size"],
            common["epsilon"],
            common["scaling"],
            common["norm_kind"],
            [] if all(rope) else rope,
            windows if any(windows) else [],
        )
        self._native = torch.classes.tle.DecodePlan(self.weights, *self.arguments)

    def run(
        self,
        decoder: nn.Module,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Cache,
        starts: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs all layers and the final norm, and stores the new tokens.

        Args:
            hidden: embedded tokens [B, Q, H], of `dtype`.
            position_ids: int64 [B or 1, Q].
            starts: int64 [B], each row's left padding, or None.

        Returns:
            the final hidden states [B, Q, H].
        """
        batch, tokens = hidden.shape[:2]
        cos, sin = getattr(decoder, self.rotary)(hidden, position_ids)
        keys, values, used = cache.prepare_step(
            self.layer_count, batch, self.key_heads, tokens, self.head_dim, hidden.dtype
        )
        hidden = _step(hidden, self._native, keys, values, used, cos, sin, starts)
        cache.commit_step(self.layer_count, tokens)
        return hidden

    def token_plan(self, model: nn.Module) -> TokenPlan | None:
        """For `model`, whose decoder this plan is of; see `TokenPlan.of`."""
        return TokenPlan.of(model, self)

    def _norm_facts(self, norm: nn.Module) -> dict[str, object]:
        if not isinstance(norm, PatchedNorm):
            raise NotFusable(f"a {type(norm).__name__} is not patched")
        self._watch_settings(norm, norm.tle_eps, "tle_kind")
        return {"epsilon": getattr(norm, norm.tle_eps), "norm_kind": norm.tle_kind}


def _pair(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    return linear_weight(linear), linear.bias


class TokenPlan:
    """A `StepPlan` and what stands around the layers (embedding, rotary tables, head): from token ids to logits, or on
    to the next ids, without Python in between. It holds the tensors that the model has now: for a stretch in which
    nobody can change the model."""

    @classmethod
    def of(cls, model: nn.Module, plan: StepPlan) -> TokenPlan | None:
        """The plan for a causal model whose logits are its head applied to its decoder's output; None if its embedding,
        its rotary tables or its head do more than the operators."""
        decoder, head = model.base_model, model.get_output_embeddings()
        embedding, rotary = decoder.get_input_embeddings(), getattr(decoder, plan.rotary)
        if any(has_user_hooks(m) for m in (embedding, rotary, head)):
            return None
        if isinstance(embedding, PackedEmbedding):
            table, dtype = embedding._buffers["packed"], embedding._buffers["weight_like"].dtype
        elif type(embedding) is nn.Embedding and nn.Embedding.forward is _embed and embedding.max_norm is None:
            table = embedding.weight
            dtype = table.dtype
        else:
            return None
        if dtype != plan.dtype or not is_plain_linear(head) or head.in_features != embedding.embedding_dim:
            return None
        # Types whose frequencies depend on the positions compute them before every step.
        if "dynamic" in rotary.rope_type or rotary.rope_type == "longrope":
            return None
        sizes = (embedding.num_embeddings, head.out_features, embedding.embedding_dim)
        rotation = (rotary.inv_freq.float(), rotary.attention_scaling)
        return cls(plan, (table, linear_weight(head), head.bias, *sizes, *rotation))

    def __init__(self, plan: StepPlan, parts: tuple):
        self.plan = plan
        self._native = torch.classes.tle.TokenPlan(plan._native, *parts)

    def stretch(
        self, batch: int, position_ids: torch.Tensor, cache: Cache, starts: torch.Tensor | None, steps: int
    ) -> TokenStretch:
        """The steps of `batch` rows that follow what `cache` holds, with room for at least `steps`.

        Args:
            position_ids: int64 [B or 1, 1], of the first step.
            starts: int64 [B], each row's left padding, or None.
        """
        return TokenStretch(self, batch, position_ids, cache, starts, steps)


class TokenStretch:
    """Tokens through a `TokenPlan`, one step after the other, while nobody changes the model or the cache: operands are
    looked at once. For one caller at a time.

    Attributes:
        room: how many more steps the cache has slots for.
    """

    def __init__(
        self,
        plan: TokenPlan,
        batch: int,
        position_ids: torch.Tensor,
        cache: Cache,
        starts: torch.Tensor | None,
        steps: int,
    ):
        step = plan.plan
        keys, values, used = cache.prepare_step(
            step.layer_count, batch, step.key_heads, steps, step.head_dim, step.dtype
        )
        self._cache, self._layer_count = cache, step.layer_count
        self._native = torch.classes.tle.TokenStretch(plan._native, keys, values, used, position_ids, starts)
        self.room = min(slots.shape[2] for slots in (*keys, *values)) - used

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits [B, V] after `tokens`, int64 [B], which are stored."""
        logits = _logits(tokens, self._native)
        self._stored(1)
        return logits

    def greedy(self, tokens: torch.Tensor, count: int, ends: torch.Tensor | None) -> torch.Tensor:
        """The next n tokens after `tokens`, int64 [1], each the likeliest: int64 [n], 1 <= n <= `count`. Stops after a
        token of `ends`, and when about 0.1 s have passed. All but the last are stored."""
        chosen = _greedy_steps(tokens, self._native, count, ends)
        self._stored(len(chosen))
        return chosen

    def _stored(self, tokens: int) -> None:
        self._cache.commit_step(self._layer_count, tokens)
        self.room -= tokens


_embed = nn.Embedding.forward


class Router:
    """Decides, call by call, whether a decoder's step runs as one operator. Lives on the decoder as `tle_router`.

    Attributes:
        disabled: None, or why this decoder always runs module by module (its attention or its self-check failed).
    """

    def __init__(self, disabled: str | None = None):
        self.disabled = disabled
        self._plan: StepPlan | None = None
        # What each class computed when patch_model proved it; somebody may put another forward on a class later.
        self._forwards: dict[type, object] = {}

    def plan(self, decoder: nn.Module) -> StepPlan:
        """The current plan, made anew if the decoder changed."""
        plan = self._plan
        if plan is None or not plan.is_current():
            plan = self._plan = StepPlan(decoder, family_of(decoder), self._forwards)
        return plan

    def refusal(self, decoder: nn.Module) -> str | None:
        """Why `decoder` runs module by module as it is now, or None."""
        return self.disabled or self.plan(decoder).refusal

    # A plan is made of the objects of one decoder: a copy of the decoder makes its own.
    def __deepcopy__(self, memo) -> Router:
        return Router(self.disabled)

    def __reduce__(self):
        return Router, (self.disabled,)

    def run(
        self,
        decoder: nn.Module,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: Cache,
        inputs_embeds: torch.Tensor | None,
        extra: dict[str, object],
    ) -> torch.Tensor | None:
        """Runs one step: all layers and the final norm.

        Returns:
            the final hidden states [B, Q, H], with the new tokens stored in `cache`; None if the step has to run module
            by module. Then nothing has happened, except that modules outside the layers may have been called.
        """
        plan = self.usable_plan(decoder, extra)
        if plan is None:
            return None
        source = input_ids if inputs_embeds is None else inputs_embeds
        if source is None or (inputs_embeds is None) == (input_ids is None) or source.shape[1] == 0:
            return None
        batch, tokens = source.shape[:2]
        used = cache.get_seq_length()
        starts = left_padding(attention_mask, used + tokens)
        if starts is False:
            return None
        if position_ids is None:
            position_ids = torch.arange(used, used + tokens, device=source.device).unsqueeze(0)
        elif position_ids.dim() != 2 or position_ids.shape[1] != tokens or position_ids.shape[0] not in (1, batch):
            return None
        hidden = decoder.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if hidden.dtype != plan.dtype or (hidden.requires_grad and torch.is_grad_enabled()):
            return None
        return plan.run(decoder, hidden, position_ids, cache, starts)

    def usable_plan(self, decoder: nn.Module, extra: dict[str, object]) -> StepPlan | None:
        """The plan if a step of `decoder` may run in one call as things are, whatever its inputs; else None."""
        if self.disabled is not None or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return None
        if _asks_for_more(decoder, extra):
            return None
        plan = self.plan(decoder)
        if plan.refusal is not None or plan.layer_count != vars(decoder.config).get("num_hidden_layers"):
            return None
        if decoder.training and (decoder.gradient_checkpointing or any(a.training for a in plan.dropouts)):
            return None
        return plan


def _asks_for_more(decoder: nn.Module, extra: dict[str, object]) -> bool:
    """Whether a call or the config wants something that only the modules themselves can give."""
    for name, value in extra.items():
        if value is not None and value is not False and name not in _HARMLESS:
            return True
    config = vars(decoder.config)
    return (
        config.get("_attn_implementation_internal") != ATTENTION
        or bool(config.get("_output_attentions"))
        or bool(config.get("output_hidden_states"))
        or config.get("is_causal", True) is False
        or extra.get("is_causal") is False
        or extra.get("return_dict") is False
        or config.get("return_dict", True) is False
        or has_global_hooks()
    )


class PatchedDecoder(PatchedPreTrainedModel):
    """A base model (embedding, layers, final norm) whose steps run in one call where possible."""

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ):
        caching = self.config.use_cache if use_cache is None else use_cache
        if caching and past_key_values is None and not (self.training and self.gradient_checkpointing):
            past_key_values = Cache(self.config, dtype=self.tle_kv_dtype)
        cache = past_key_values if type(past_key_values) is Cache else None
        if cache is not None and caching:
            hidden = self.tle_router.run(
                self, input_ids, attention_mask, position_ids, cache, inputs_embeds, kwargs
            )
            if hidden is not None:
                return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)
        lengths = None if cache is None else cache.lengths()
        try:
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                **kwargs,
            )
        except BaseException:
            if cache is not None:
                # Layers before the one that failed have stored their tokens already.
                cache.restore_lengths(lengths)
            raise

    def tle_restore(self) -> None:
        del self.tle_router
        super().tle_restore()


def self_check(decoder: PreTrainedModel) -> str | None:
    """Runs two steps (a prefill of three tokens and one more token) of a patched decoder as one call and module by
    module, and compares the bits.

    Returns:
        None if they agree or if the decoder does not run in one call anyway, else what went wrong.
    """
    router: Router = decoder.tle_router
    if router.refusal(decoder) is not None:
        return None
    generator = torch.Generator().manual_seed(20240229)
    vocabulary = decoder.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (1, 4), generator=generator)
    outputs = []
    training = decoder.training
    try:
        for route in (None, "self-check"):
            decoder.training = False
            router.disabled = route
            cache = Cache(decoder.config, dtype=decoder.tle_kv_dtype)
            with torch.no_grad():
                steps = [decoder(input_ids=part, past_key_values=cache, use_cache=True) for part in ids.split(3, dim=1)]
            outputs.append(torch.cat([step.last_hidden_state for step in steps], dim=1))
    except Exception as error:
        return f"its self-check failed: {error}"
    finally:
        decoder.training = training
        router.disabled = None
    if not _same_bits(outputs):
        return "its self-check failed: one call and module by module differ"
    return None


def _same_bits(tensors: Iterable[torch.Tensor]) -> bool:
    first, *others = (t.contiguous().view(torch.uint8) for t in tensors)
    return all(torch.equal(first, other) for other in others)
