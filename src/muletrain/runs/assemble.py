"""Makes the pieces of a run from a configuration: the plan that all peers share, and one peer's compute."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

import muletrain
from muletrain.cgroups import cpus
from muletrain.clock import LoopClock
from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.estimate import STASH_SHARE
from muletrain.compute.paced import PacedCompute
from muletrain.compute.probe import precision_dtype
from muletrain.compute.swap.fit import client_needs, stage_needs
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import digest
from muletrain.config.model_sections import AdapterConfig, ModelConfig
from muletrain.config.schema import Precision, RunConfig
from muletrain.data.microbatch import HeldoutSource, MicrobatchSource, sequence_length
from muletrain.data.ngram import spread
from muletrain.data.samples import HeldoutSamples, SampleData, SampleSource, open_data
from muletrain.data.tokenizer import check_own
from muletrain.data.tokens import TokenCache
from muletrain.errors import CheckpointError, ConfigError, DataError
from muletrain.model.compression import PREFIX
from muletrain.model.finite import finite
from muletrain.model.hf import import_hf, spec_in, stops_in
from muletrain.model.hf_files import CONFIG, TOKENIZER, read_json
from muletrain.model.hf_hub import local_folder
from muletrain.model.make import make_model, make_stage, tied_between
from muletrain.model.native import is_native
from muletrain.model.stage import initial_weight
from muletrain.model.traced.adapter import described, first_weight, read_config, reader
from muletrain.model.traced.apart import mixed_by
from muletrain.model.traced.architecture import transposed
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.factory import first_weights
from muletrain.model.traced.folder import (
    base_kind,
    check_config,
    import_traced,
    load_base,
    load_traced,
    run_context,
    traced_in,
    with_adapter,
)
from muletrain.optim.schedule import learning_rate
from muletrain.policy.shards import CHUNK, lone_chunk
from muletrain.runs.base import check_quantising, digests_of
from muletrain.runs.checkpoint import FORMAT
from muletrain.runs.join.seating import Seating
from muletrain.runtime.core.plan import Plan, Validation
from muletrain.strategies import strategy_of
from muletrain.wire.encoded import flat_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.compute.estimate import StageMemory
    from muletrain.data.microbatch import TokenArray
    from muletrain.data.samples import Data
    from muletrain.model.chain import Model, TensorType
    from muletrain.planning.partition import Cut
    from muletrain.runs.measure.machine import Machine
    from muletrain.strategies.base import Strategy


@dataclass(frozen=True)
class RunFacts:
    """Facts that follow from the configuration alone."""

    config: RunConfig
    spec: Model
    cut: Cut
    """(first layer, end) of each stage."""
    alone: bool = False
    """``Plan.alone``, which the command decides."""

    @classmethod
    def of(cls, config: RunConfig, *, alone: bool = False) -> RunFacts:
        """Raises ConfigError when the model cannot be cut as asked."""
        spec = make_model(config.model)
        cut = spec.cut(config.fleet.stages, config.fleet.layers)
        return cls(config, spec.placed(cut), cut, alone)

    def drawn(self) -> RunFacts:
        """The same facts with first weights from the seed, for a peer that loads its state later."""
        model = self.config.model.model_copy(update={"from_": None, "factory": None})
        return dataclasses.replace(self, config=self.config.model_copy(update={"model": model}))

    @property
    def config_digest(self) -> bytes:
        return bytes.fromhex(digest(self.config))

    @property
    def tokens(self) -> int:
        """Largest microbatch [tokens]."""
        return self.config.train.microbatch * self.spec.context

    @property
    def strategy(self) -> Strategy:
        return strategy_of(self.config)

    @property
    def capacity(self) -> int:
        """``Plan.capacity``."""
        return self.strategy.capacity(self.config.fleet.stages)

    def plan(self) -> Plan:
        c, t = self.config, self.config.train
        return Plan(
            stages=c.fleet.stages,
            steps=t.steps,
            microbatches=c.microbatches,
            sequences=t.microbatch,
            width=self.spec.passed,
            vocab=self.spec.vocab,
            inputs=self.spec.inputs,
            targets=dataclasses.replace(
                self.spec.targets, column=c.data.counts, apart=c.data.counts and self.spec.apart
            ),
            sequence_length=functools.partial(
                sequence_length, context=self.spec.context, start=t.sequence_start, warmup=t.sequence_warmup
            ),
            activations=c.wire.activations,
            gradients=c.wire.gradients,
            clip=c.optimizer.clip,
            lr=functools.partial(learning_rate, c.optimizer, total_steps=t.steps),
            checkpoint_every=c.checkpoint.every,
            max_skipped=t.max_skipped,
            capacity=self.capacity,
            strategy=self.strategy,
            rebalance=c.fleet.rebalance,
            rebalance_s=c.fleet.rebalance_period,
            work=tuple(t.microbatch * self.spec.context * flops for flops in self.stage_costs()),
            state_bytes=tuple(
                (16 if c.optimizer.delayed else 12) * self.spec.stage_params(self.cut, s) for s in range(c.fleet.stages)
            ),
            trace=c.fleet.trace,
            adopt_after_s=c.fleet.adopt_after,
            from_seed=c.model.given is None,
            delayed=c.optimizer.delayed,
            verify=c.hub.verify if self.strategy.pooled else 0.0,
            tied=tied_between(self.spec, self.cut),
            alone=self.alone,
            chunk=lone_chunk(self.spec.params) if self.alone else CHUNK,
            validation=Validation.of(t, self.spec),
        )

    def heldout(self, data: Data) -> HeldoutSource | HeldoutSamples | None:
        """Held-out microbatches of the run's ``data``; None if the run does not measure during training. A module's own
        loss knows no padding, so the module gets only whole microbatches. Raises DataError if the text has no whole
        microbatch."""
        t = self.config.train
        if not t.validate_every:
            return None
        if isinstance(data, SampleData):
            return HeldoutSamples(data, t.validate_tokens, t.microbatch, self.spec.vocab)
        tokens = spread(data.heldout, t.validate_tokens + 1, data.row)
        if self.spec.own_loss:
            tokens = tokens[: (len(tokens) - 1) // self.tokens * self.tokens + 1]
            if len(tokens) < 2:
                raise DataError(
                    f"train.validate_every: {len(data.heldout)} held-out tokens (measured: at most {t.validate_tokens}) are "
                    f"no microbatch of {self.tokens}; give more text, raise train.validate_tokens, or lower train.microbatch"
                )
        counts, sizes = self.config.data.counts, (self.spec.context, t.microbatch, self.spec.vocab)
        return HeldoutSource(tokens, *sizes, column=counts, apart=counts and self.spec.apart)

    def data(self, progress: Callable[[float], None] | None = None) -> Data:
        """The run's tokens or samples on this machine. Raises DataError or ConfigError."""
        return open_data(self.config.data, self.spec, progress)

    def source(self, data: Data) -> MicrobatchSource | SampleSource:
        if isinstance(data, TokenCache):
            return self.source_of(data.train)
        t = self.config.train
        return SampleSource(data, t.seed, t.batch, t.microbatch, self.spec.vocab, t.data_offset)

    def source_of(self, tokens: TokenArray) -> MicrobatchSource:
        """Microbatches of the training tokens. Raises DataError for fewer tokens than one sequence."""
        t = self.config.train
        sequences = (t.batch, t.microbatch, self.spec.context, t.sequence_start, t.sequence_warmup, t.data_offset)
        ignored = self.spec.vocab if self.config.data.counts else None
        return MicrobatchSource(tokens, t.seed, *sequences, ignored, apart=self.spec.apart)

    @property
    def precision(self) -> Precision:
        """fp32 if machines choose their precisions."""
        asked = self.config.compute.precision
        return Precision.FP32 if asked is Precision.AUTO else asked

    def needs(self) -> list[StageMemory]:
        """Memory that each stage needs."""
        return stage_needs(self.config, self.spec, self.cut, self.precision, alone=self.alone)

    def client_needs(self) -> list[StageMemory]:
        """Memory that each stage needs of a client."""
        return client_needs(self.config, self.spec, self.cut, self.precision)

    def moved_by_clients(self) -> list[int]:
        """Bytes that a client of each stage moves in a step: weights, and its accumulator."""
        stages, codec = range(self.config.fleet.stages), self.config.wire.gradients
        trained = [flat_size(codec, self.spec.trained_params(self.cut, s)) for s in stages]
        return [4 * self.spec.stage_params(self.cut, s) + trained[s] for s in stages]

    def stage_costs(self) -> list[float]:
        """FLOPs per token of the forward of each stage."""
        return [self.spec.stage_flops(self.cut, s) for s in range(self.config.fleet.stages)]

    def seating(self) -> Seating:
        """Assigns newcomers to stages."""
        helpers = {name: s for s, names in enumerate(self.config.hub.helpers) for name in names}
        return Seating(self.needs(), self.stage_costs(), self.strategy, self.client_needs(), helpers)

    def manifest(self, run_id: str) -> dict[str, object]:
        """A checkpoint's manifest, without the parts."""
        return {
            "format": FORMAT,
            "run_id": run_id,
            "config": json.loads(self.config.model_dump_json(by_alias=True)),
            "spec": json.loads(self.spec.to_json()),
            "cut": [list(c) for c in self.cut],
        }


def build_compute(
    facts: RunFacts,
    stage: int,
    machine: Machine,
    fleet_index: int | None,
    part: Path | None = None,
    *,
    updates: bool = True,
    folder: Path | None = None,
    base: Mapping[str, Tensor] | None = None,
) -> Compute:
    """Build the stage's compute, paced if the fleet profile declares service times. ``part``: the checkpoint part with
    the stage's weights; default: ``model.from``, or drawn from the seed. ``updates``: see ``StageSetup``. ``folder``:
    private to this peer, for a stage that is larger than the device. ``base``: the stage's weights of ``Model.base``. Raises
    CheckpointError, and CapacityError if the stage can only be swapped and backing memory is too small."""
    config, need = facts.config, (facts.needs() if updates else facts.client_needs())[stage].on(machine.offer)
    setup = StageSetup(
        optimizer=config.optimizer,
        total_steps=config.train.steps,
        seed=config.train.seed,
        sequences=config.train.microbatch,
        microbatches=config.microbatches,
        device=machine.device,
        precision=machine.precision,
        checkpointing="block" if need.by_block else config.compute.checkpointing,
        stash_budget=_stash_budget(need, machine),
        updates=updates,
        lends=not need.copies,
        compiled=config.compute.compile == "on" or (config.compute.compile == "auto" and machine.device.type == "cuda"),
    )
    source = initial_weights(facts, stage) if part is None else _weights_in(part)
    if source is not None:
        where = str(part or facts.config.model.given)
        source = finite(source, where, precision_dtype(machine.precision))
    if base is not None:
        source = _beside(base, source or _drawn_weights(facts, stage), machine.precision)
    compute: Compute
    if need.resident(machine.offer) or need.swapped is None or not need.swapped.fits(machine.offer):
        compute = TorchCompute(facts.spec, facts.cut, stage, setup, source)
    else:
        disk = need.swapped.on_disk(machine.offer)
        assert folder is not None or not disk, "a stage on a disk needs a folder"
        most = min(config.swap.together or facts.capacity, facts.capacity, config.microbatches)
        swap = Swap(machine.offer, folder if disk else None, most, config.swap.together, facts.alone)
        compute = SwappedCompute(facts.spec, facts.cut, stage, setup, swap, source)
    if config.fleet.profile is not None and fleet_index is not None:
        peer = load_fleet(config.fleet.profile, peers=config.fleet.local_peers).peers()[fleet_index]
        if peer.forward_s and peer.backward_s:
            compute = PacedCompute(compute, LoopClock(), peer.forward_s, peer.backward_s)
    return compute


def _drawn_weights(facts: RunFacts, stage: int) -> Callable[[str], Tensor]:
    shapes, seed = make_stage(facts.spec, stage, facts.cut).shapes(), facts.config.train.seed
    return lambda name: initial_weight(facts.spec, name, shapes[name], seed)


def _beside(
    base: Mapping[str, Tensor], state: Callable[[str], Tensor], precision: Precision
) -> Callable[[str], Tensor]:
    """Loads from ``base``, and else from ``state``. Weights of ``base`` are finite; fp16 may not hold them all."""
    load: Callable[[str], Tensor] = base.__getitem__
    if precision is Precision.FP16:
        load = finite(load, "model.from", precision_dtype(precision))
    return lambda name: load(name) if name in base else state(name)


def _stash_budget(need: StageMemory, machine: Machine) -> int:
    """Device bytes left beside the stage itself, as far as ``STASH_SHARE`` allows."""
    offer = machine.offer
    left = offer.device - need.of_device(offer)
    return max(0, min(int(STASH_SHARE * offer.device), left))


def _weights_in(part: Path) -> Callable[[str], Tensor]:
    def load(name: str) -> Tensor:
        try:
            with safe_open(part, framework="pt") as file:
                tensor: Tensor = file.get_tensor(f"model/{name}")
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{part}: {name} cannot be read ({e}); use another checkpoint of the run") from e
        return tensor

    return load


def check_first_weights(facts: RunFacts, tell: Callable[[float], None]) -> None:
    """Read all weights of ``model.from``. ``tell`` gets the share that is done. Raises CheckpointError for weights that
    are not finite, or not finite in a given ``compute.precision``."""
    dtype = precision_dtype(facts.precision)
    for stage in range(len(facts.cut)):
        names = list(make_stage(facts.spec, stage, facts.cut).shapes())
        load = initial_weights(facts, stage)
        assert load is not None
        load = finite(load, "model.from", dtype)
        for number, name in enumerate(names, start=1):
            load(name)
            tell((stage + number / len(names)) / len(facts.cut))


def initial_weights(facts: RunFacts, stage: int) -> Callable[[str], Tensor] | None:
    """Loader of the state's first weights by name; None: drawn from the seed. Raises CheckpointError; so does the loader
    for weights that are not finite."""
    if facts.config.model.given is None:
        return None
    shapes, seed = make_stage(facts.spec, stage, facts.cut).shapes(), facts.config.train.seed
    load = _adapters_weights(facts, shapes) if facts.spec.base else _given_weights(facts, stage)

    def first(name: str) -> Tensor:
        if name.startswith(f"{PREFIX}."):  # no checkpoint to start from has these
            return initial_weight(facts.spec, name, shapes[name], seed)
        return load(name)

    return finite(first, facts.config.model.given)


def _adapters_weights(facts: RunFacts, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[str], Tensor]:
    """Loader of the adapter's first weights. Raises CheckpointError."""
    adapter, seed = facts.config.adapter, facts.config.train.seed
    if adapter.from_ is not None:
        return reader(Path(adapter.from_))
    spec, folder = facts.spec, Path(facts.config.model.from_ or "")
    assert isinstance(spec, TracedModel)
    base = functools.cache(lambda: load_base(folder, spec, adapter.base))
    turned = transposed(spec.architecture) if adapter.dora else frozenset[str]()
    return lambda name: first_weight(name, shapes[name], seed, lambda of: base()(of).float(), turned)


def _given_weights(facts: RunFacts, stage: int) -> Callable[[str], Tensor]:
    """Loader of the weights of ``model.factory`` or ``model.from``. Raises CheckpointError if layers to be shared differ:
    all but the first would be lost."""
    if facts.config.model.factory is not None and isinstance(facts.spec, TracedModel):
        return first_weights(facts.spec.config, facts.config.train.seed).__getitem__
    assert facts.config.model.from_ is not None
    folder = Path(facts.config.model.from_)
    if isinstance(facts.spec, TracedModel):
        return load_traced(folder, facts.spec)
    load = import_hf(folder, untie=True)[1]
    first, end = facts.cut[stage]
    prefix = f"model.layers.{first}."
    leaves = [n.removeprefix(prefix) for n in make_stage(facts.spec, stage, facts.cut).shapes() if n.startswith(prefix)]
    for layer in range(first + 1, end) if facts.spec.share_layers else ():
        if not all(torch.equal(load(f"model.layers.{layer}.{leaf}"), load(prefix + leaf)) for leaf in leaves):
            raise CheckpointError(
                f"model.share_layers: layers {first} and {layer} of {facts.config.model.from_} differ, one block cannot "
                f"stand for both; leave it out"
            )
    return load


def resolve_start(
    config: RunConfig, *, weights: bool = True, note: Callable[[str], None] = lambda text: None, attends: bool = False
) -> RunConfig:
    """``config`` with the sizes of the checkpoint in ``model.from``, and the checkpoint's tokenizer unless the user
    names one. Sequence length, dropout, layer sharing and everything else stay the user's. With ``model.factory``, the
    sizes of the built module. Without ``weights`` only ``config.json`` is read, or fetched. ``note`` gets remarks for
    people. ``attends``: ``model.attention`` is decided, too (``attending``), by ``data.format``, so that only the chain that
    will be computed is traced. Raises CheckpointError, or ConfigError if the user asks for different sizes."""
    if config.model.factory is not None:
        return _resolve_factory(config)
    if config.adapter.from_ is not None:
        folder = Path(config.adapter.from_).expanduser().resolve()
        config = with_adapter_of(config, folder)
    if config.model.from_ is None:
        if config.adapter.rank is not None and config.model.architecture is None:
            raise ConfigError("adapter.rank: an adapter belongs to a trained model; name one by model.from")
        return config
    if weights:
        check_quantising(config)
    given = config.model.model_dump(include=config.model.model_fields_set - {"from_"}, exclude_none=True)
    changes, data = {name: given[name] for name in ("context", "dropout", "untie") if name in given}, config.data

    def is_own(folder: Path) -> bool:
        own = folder.resolve()
        return data.factory is None and data.tokenizer in ("train", str(own), str(own / TOKENIZER))

    def check(folder: Path) -> None:
        vocab = check_config(folder, **changes)
        if is_own(folder) and (folder / TOKENIZER).is_file():
            check_own(folder, vocab)

    try:
        folder = local_folder(config.model.from_, check, weights=weights)
        packs = attends and data.counts and data.pack and config.model.attention == "auto"
        sizes = sizes_in(folder, given, config.adapter, weights=weights, note=note, packs=packs)
    except CheckpointError as e:
        raise CheckpointError(f"model.from: {e}") from e
    if is_own(folder) and weights:
        check_own(folder, sizes["vocab"])
        data = data.model_copy(update={"tokenizer": str(folder.resolve())})
        sizes["stops"] = stops_in(folder)
    sizes = _stated(config.model) | sizes
    check_given({n: v for n, v in given.items() if v != "auto"}, sizes, "model.from, whose checkpoint")
    model = ModelConfig.model_validate({**sizes, "from": str(folder.resolve())})
    adapter = config.adapter
    if adapter.rank is not None and weights:
        spec = make_model(model)
        assert isinstance(spec, TracedModel)
        adapter = adapter.model_copy(update={"digests": digests_of(folder.resolve(), spec, adapter.base, note)})
    return RunConfig.model_validate({**dict(config), "model": model, "data": data, "adapter": adapter})


def _resolve_factory(config: RunConfig) -> RunConfig:
    own = config.model
    if own.from_ is not None:
        raise ConfigError("model.factory: the model comes from model.from as well; leave one of them out")
    kinds: tuple[TensorType, ...] = ()
    if config.data.factory is not None:
        data = SampleData.build(config.data.factory, skips=config.data.on_error == "skip")
        kinds = (data.inputs, data.targets)
    model = TracedModel.by_factory(own, *kinds)
    free = {"factory": own.factory, "arguments": own.arguments, **_stated(own)}
    sizes = {name: getattr(model, name) for name in SIZES} | {"chain": model.chain_name}
    check_given(
        own.model_dump(include=own.model_fields_set, exclude_none=True), sizes | free, "model.factory, whose module"
    )
    return RunConfig.model_validate({**dict(config), "model": ModelConfig.model_validate({**sizes, **free})})


def _stated(config: ModelConfig) -> dict[str, Any]:
    """The stated fields about what no model that is given says: compression, and what attention sees."""
    own = {"compression", "compression_factor", "compression_after", "attention"}
    return config.model_dump(include=own & config.model_fields_set)


def attending(config: RunConfig, note: Callable[[str], None] = lambda text: None) -> RunConfig:
    """``config``, whose data are resolved, with ``model.attention`` decided. ``note`` gets a remark for people if a token
    sees other conversations. Raises ConfigError if the user asks for what the architecture does not allow."""
    if not (config.data.counts and config.data.pack) or config.model.attention == "row":
        return config
    spec = make_model(config.model.model_copy(update={"attention": "auto", "chain": None}))
    model = {"attention": "conversation"}
    if isinstance(spec, TracedModel):
        if spec.own_loss or (why := mixed_by(spec)):
            why = "a module of yours mixes tokens as it will" if spec.own_loss else why
            if config.model.attention == "conversation":
                raise ConfigError(
                    f"model.attention: this architecture cannot keep conversations apart: {why}; leave it out"
                )
            note(
                f"model.attention: in a row, a token sees earlier conversations, too ({why}); data.pack=false gives each a row of "
                f"its own"
            )
            model = {"attention": "row"}
        elif config.model.chain is not None:
            model["chain"] = spec.with_apart().chain_name
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def versions() -> dict[str, str]:
    """Versions that decide a run's numbers and speed, and the number of CPUs."""
    from importlib.metadata import version

    found = {"muletrain": muletrain.__version__}  # perhaps not installed: a source tree on PYTHONPATH
    return found | {name: version(name) for name in ("torch", "hivemind")} | {"cpus": str(cpus())}


_NOT_TIED = (
    "model.from: its output matrix differs from its embedding, although config.json ties them: both are kept and trained, as "
    "transformers does, and what is exported is not tied"
)
SIZES = ("layers", "width", "vocab", "context", "architecture")


def with_adapter_of(config: RunConfig, folder: Path) -> RunConfig:
    """``config`` with the adapter that is in ``folder``. Raises CheckpointError, or ConfigError if the user asks for
    another one."""
    own = {"dropout", "base", "quantise", "digests"}
    found = {**read_config(folder), "from": str(folder), **config.adapter.model_dump(include=own)}
    asked = config.adapter.model_dump(include=config.adapter.model_fields_set - {"from_", *own}, exclude_none=True)
    adapter = AdapterConfig.model_validate(found)
    for name, value in asked.items():
        if value != getattr(adapter, name):
            raise ConfigError(
                f"adapter.{name}: {value!r} beside adapter.from, which has {getattr(adapter, name)!r}; leave it out"
            )
    return config.model_copy(update={"adapter": adapter})


def sizes_in(
    folder: Path,
    given: dict[str, Any],
    adapter: AdapterConfig,
    *,
    weights: bool,
    note: Callable[[str], None],
    packs: bool = False,
) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that describe the model in ``folder`` with ``adapter``, with a check of its weights if
    ``weights``. ``packs``: conversations of one row are kept apart if the architecture allows that. Raises CheckpointError
    or ConfigError."""
    context = run_context(folder, given.get("context"))
    if is_native(folder) and adapter.rank is None:
        untie = given.get("untie", False)
        spec = spec_in(folder, context=context, untie=untie)
        if weights:
            tied, spec = spec.tie, import_hf(folder, context=context, untie=untie)[0]
            if tied > spec.tie:
                note(_NOT_TIED)
        own = {
            "dropout": given.get("dropout", 0.0),
            "share_layers": given.get("share_layers", False),
            "untie": untie,
        }
        sizes: dict[str, Any] = json.loads(spec.to_json())
        del sizes["compression"], sizes["apart"]
        return {**sizes, **own}
    own = {name: given[name] for name in ("dropout", "untie") if name in given}
    put_in = None if adapter.rank is None else described(adapter, _kind_of_base(folder, adapter, weights=weights))
    model = with_adapter(traced_in(folder, context=context, **own), put_in)
    if weights:
        declared, model = model, import_traced(folder, context=context, adapter=put_in, **own)
        if declared != model:
            note(_NOT_TIED)
    apart = {"attention": "conversation"} if packs and not mixed_by(model) else {}
    computed = model.with_apart() if apart or given.get("attention") == "conversation" else model
    chain = {"chain": computed.chain_name} if weights or "chain" in given else {}
    about = {name: getattr(computed, name) for name in SIZES} | {"architecture": model.architecture}
    return {**about, **chain, **apart, **own}


def _kind_of_base(folder: Path, adapter: AdapterConfig, *, weights: bool) -> str:
    """The type of most weights beside the adapter; without ``weights`` that which ``config.json`` names."""
    if adapter.base != "auto":
        return adapter.base
    if weights:
        return base_kind(folder)
    config = read_json(folder / CONFIG)
    named = str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(named, "fp32")


def check_given(given: dict[str, Any], sizes: Mapping[str, object], beside: str) -> None:
    """Raises ConfigError if the user's sizes differ from ``sizes``, the sizes of ``beside``."""
    for name, value in given.items():
        if value != sizes.get(name):
            raise ConfigError(
                f"model.{name}: {value!r} beside {beside} has {sizes.get(name, 'sizes of its own')!r}; leave it out"
            )
