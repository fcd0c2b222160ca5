"""Other ways to train."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from proofs.draws.common import HARMLESS, Kind, calm, span, with_faults
from proofs.scenario import FOR_EVER_S, Fault, Scenario, stage_of

if TYPE_CHECKING:
    import random

COARSE, FINE = 5e-3, 2e-4
"""Norm of the difference over norm with numbers of 8, and of 16 bits."""
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "attention_dropout": 0.1,
}
TRACED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_head": 2, "n_positions": 16},
    "llama": TINY,
    "qwen3": {**TINY, "head_dim": 8},
    "gemma3_text": {**TINY, "head_dim": 8, "sliding_window": 3},
    "mixtral": {**TINY, "num_local_experts": 4},
}
"""Architectures of ``transformers``, and their sizes."""


def _with(*overrides: str, tolerance: float = 0.0) -> Kind:
    def kind(s: Scenario, rng: random.Random) -> Scenario | None:
        new = [o for o in overrides if o not in s.overrides]
        if {o.partition("=")[0] for o in s.overrides} & {o.partition("=")[0] for o in new}:
            return None
        return replace(s, overrides=(*s.overrides, *new), tolerance=max(s.tolerance, tolerance))

    return kind


def _codecs(s: Scenario, rng: random.Random) -> Scenario | None:
    """The large epsilon keeps AdamW from enlarging what is next to nothing. Errors of rounding add up like a random walk, and
    learned compression enlarges them: without any fault 9e-3 after 27 steps."""
    activations, gradients = (
        rng.choice(["fp32", "fp16", "bf16", "int8", "dynamic8"]),
        rng.choice(["fp16", "bf16", "int8"]),
    )
    coarse = {"int8", "dynamic8", "bf16"} & {activations, gradients}
    overrides = (f"wire.activations={activations}", f"wire.gradients={gradients}", "optimizer.eps=0.1")
    grown = max(1.0, s.steps / 20) ** 0.5 * (2 if any("model.compression" in o for o in s.overrides) else 1)
    return _with(*overrides, tolerance=COARSE * grown if coarse else FINE)(s, rng)


def _shared_layers(s: Scenario, rng: random.Random) -> Scenario | None:
    """The last bits of a model with more layers come apart further, which AdamW enlarges where gradients are next to nothing:
    3e-5 after one step of 15 layers, 7e-8 with a large epsilon."""
    if any(o.startswith("model.architecture") for o in s.overrides):
        return None
    layers = len(s.stages) * rng.randint(2, 3)
    return _with(f"model.layers={layers}", "model.share_layers=true", "optimizer.eps=0.1")(s, rng)


def _growing(s: Scenario, rng: random.Random) -> Scenario | None:
    return _with("model.context=12", "train.sequence_start=2", f"train.sequence_warmup={rng.randint(1, s.steps)}")(
        s, rng
    )


def _given_weights(s: Scenario, rng: random.Random) -> Scenario | None:
    """Before the first checkpoint nothing can be begun again: no stage is lost."""
    gone = {f.who[0] for f in s.faults if f.kind in ("kill", "leave", "move")}
    stay = {stage_of(p) for p, _ in s.members if p not in gone}
    kinds = {f.kind for f in s.faults} - HARMLESS - {"kill", "leave", "move"}
    return replace(calm(s) if kinds or len(stay) < len(s.stages) else s, given_weights=True)


def _fp16(s: Scenario, rng: random.Random) -> Scenario | None:
    """Without clients or tied weights: parts of a gradient overflow less often than the whole, which a single process
    skips."""
    return (
        None if s.clients or _tied(s) else _with("compute.precision=fp16", "optimizer.eps=0.1", tolerance=FINE)(s, rng)
    )


def _rebalancing(s: Scenario, rng: random.Random) -> Scenario | None:
    rule: Literal["paper", "throughput"] = rng.choice(["paper", "throughput"])
    return replace(s, rebalance=rule, rebalance_s=rng.uniform(1.0, 5.0))


def _swap(s: Scenario, rng: random.Random) -> Scenario | None:
    """Some peers swap their stage. With one stage that is the strategy, or a swarm with such peers."""
    if (
        s.clients
        or (len(s.stages) == 1 and _tied(s))
        or any(o.startswith("optimizer.delayed=true") for o in s.overrides)
    ):
        return None
    members = [name for name, _ in s.members]
    swapped = tuple(name for name in members if rng.random() < 0.5) or (rng.choice(members),)
    whole = ("swap.whole=true",) if len(s.stages) == 1 and rng.random() < 0.5 else ()
    return replace(s, swapped=swapped, overrides=(*s.overrides, *whole))


def _alone(s: Scenario, rng: random.Random) -> Scenario | None:
    """One peer, which mostly swaps, without memory for a copy of its state. The power or its disk fails."""
    if s.kinds:
        return None
    own = tuple(o for o in s.overrides if not o.startswith("pipeline"))
    one = replace(s, stages=(1,), trainers=1, overrides=own, faults=(), narrow=(), checkpoint_every=rng.randint(1, 2))
    one = replace(one, disk_s=10 ** rng.uniform(-2.0, 0.5))
    how, at_s, lasting = rng.choice(["", "slow", "hangs", "full"]), rng.uniform(0.2, 1.0) * span(one), FOR_EVER_S
    if rng.random() < 0.5:
        lasting = rng.uniform(1.0, 60.0)
    fault = Fault(at_s, "disk", ("peer-0a",), lasting, how=how)
    one = with_faults(one, [fault]) if how else replace(one, resume_s=at_s)
    return (_swap(one, rng) if rng.random() < 0.8 else None) or one


LOG_BYTES, LEAST_SPEED = 400_000, 1e5
"""Bytes of past gradients that a peer keeps with a traced model, and bytes/s of a narrow link, at least: its gradients are
larger than our decoder's, and a newcomer has to keep up with them."""


def _tied(s: Scenario) -> bool:
    return any('\\"tie_word_embeddings\\": true' in o for o in s.overrides)


def _traced(s: Scenario, rng: random.Random) -> Scenario | None:
    """A traced model instead of our decoder, a block a stage. Blocks that share weights within a stage cannot be swapped;
    for fp16 see ``_fp16``."""
    from transformers import CONFIG_MAPPING  # takes seconds

    kind = rng.choice(sorted(TRACED))
    if any(o.startswith("model.share_layers") for o in s.overrides):
        return None
    fp16 = any(o == "compute.precision=fp16" for o in s.overrides)
    tied = rng.random() < 0.5 and not fp16 and (len(s.stages) > 1 or not s.swapped)
    tokens = {"vocab_size": 640, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": tied}
    config = CONFIG_MAPPING[kind](**TRACED[kind], **tokens, num_hidden_layers=len(s.stages))
    architecture = json.dumps(config.to_dict(), sort_keys=True, default=str)
    narrow = tuple((peer, max(speed, LEAST_SPEED)) for peer, speed in s.narrow)
    s = replace(s, log_bytes=max(s.log_bytes, LOG_BYTES), narrow=narrow)
    return _with(f"model.architecture={json.dumps(architecture)}", "optimizer.eps=0.1")(s, rng)  # as with shared layers


def _model_layers(s: Scenario, rng: random.Random) -> Scenario | None:
    """Learned compression between stages, backward by block with the loss in chunks of a few tokens, or both. A layer norm
    of almost equal numbers, and a maximum of two, enlarge rounding. Sums in another order give gradients that differ by
    4e-7 of their norm; AdamW with a small epsilon made 1.3e-5 of that where one element's gradient was next to nothing."""
    kind, factor = rng.choice(["bottleneck", "maxout"]), rng.choice([2, 4])
    what = rng.choice(["compressed", "in pieces", "both"]) if len(s.stages) > 1 else "in pieces"
    if (
        what != "compressed"
        and (found := _with("compute.checkpointing=block", "optimizer.eps=0.1")(s, rng)) is not None
    ):
        s = found
    if what == "in pieces":
        return s
    overrides = (f"model.compression={kind}", f"model.compression_factor={factor}", "optimizer.eps=0.1")
    return _with(*overrides, tolerance=FINE)(s, rng)


KINDS: dict[str, Kind] = {
    "codecs": _codecs,
    "lamb": _with("optimizer.name=lamb", "optimizer.lr=1e-3"),
    "no clipping": _with("optimizer.clip=none"),
    "fp16": _fp16,
    "growing": _growing,
    "given weights": _given_weights,
    "rebalancing": _rebalancing,
    "shared layers": _shared_layers,
    "swap": _swap,
    "alone": _alone,
    "traced": _traced,
    "layers": _model_layers,
}
