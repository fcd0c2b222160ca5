"""What would it gain to keep activations on the device, or to send them to backing memory, instead of computing them again?
Our rule against an exhaustive search over cuts and treatments, by the times that a plan is made of. See README.md.
``python treatments.py`` takes ten seconds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise, product

from rich.console import Console
from rich.table import Table

from muletrain.compute.swap.fit import blocks_of
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision
from muletrain.model.spec import ModelSpec
from muletrain.planning.devices import find_device
from muletrain.planning.swapping import Layer, places_bytes, swapping

LAYERS = 6
"""With embedding and head eight blocks: 128 cuts, and 3 treatments of each sub-model."""
MICROBATCHES, TOKENS = 8, 4096
"""Of a round, and of a microbatch."""
GPUS = (("H200", 55e9), ("A100", 25e9), ("RTX 3090", 25e9), ("T4", 12e9))
"""The rates of their buses each way [bytes/s]: measured on the H200; PCIe 4.0 and 3.0 with 16 lanes."""
WIDTHS = (2048, 4096)
AGAIN, SENT, KEPT = range(3)


@dataclass(frozen=True)
class Stage:
    """Blocks on a device. Lists are by block; ``graphs``: bytes that a microbatch's forward leaves."""

    layers: list[Layer]
    graphs: list[float]
    rate: float

    def round_s(self, runs: tuple[tuple[int, int], ...], treatments: tuple[int, ...]) -> float:
        """Seconds of a round. Both directions of the bus at once; what is loaded shares one with graphs that come."""
        loads = [sum(x.load_bytes for x in self.layers[a:b]) / self.rate for a, b in runs]
        total = 0.0
        for n, ((a, b), treatment) in enumerate(zip(runs, treatments, strict=True)):
            forward = MICROBATCHES * sum(x.forward_s for x in self.layers[a:b])
            backward = MICROBATCHES * sum(x.backward_s for x in self.layers[a:b])
            graph_s = MICROBATCHES * sum(self.graphs[a:b]) / self.rate if treatment == SENT else 0.0
            before, after = loads[n - 1] if n else 0.0, loads[n + 1] if n + 1 < len(runs) else 0.0
            total += max(forward, graph_s, after)
            total += max(backward - (forward if treatment != AGAIN else 0.0), graph_s + before)
        return total

    def bytes_of(self, runs: tuple[tuple[int, int], ...], treatments: tuple[int, ...]) -> float:
        """Of the device. A graph that is sent needs room for another one that comes or goes."""
        graphs = [sum(self.graphs[a:b]) for a, b in runs[:-1]]  # the last one's is there for a microbatch at a time
        kept = MICROBATCHES * sum(g for g, t in zip(graphs, treatments, strict=False) if t == KEPT)
        second = max([g for g, t in zip(graphs, treatments, strict=False) if t == SENT], default=0.0)
        return places_bytes(self.layers, runs) + kept + second

    def memory(self, share: float) -> float:
        """Bytes of a device with room for so much of the weights, beside what one block needs to compute."""
        one_by_one = tuple((n, n + 1) for n in range(len(self.layers)))
        loads = [x.load_bytes for x in self.layers]
        return max(0.0, share * sum(loads) - max(loads)) + places_bytes(self.layers, one_by_one)

    def best_s(self, memory: float) -> float:
        """Seconds of a round under the best cut and treatments."""
        count, found = len(self.layers), []
        for size in range(count):
            for inner in combinations(range(1, count), size):
                ends = (0, *inner, count)
                runs = tuple(pairwise(ends))
                if places_bytes(self.layers, runs) > memory:
                    continue
                found += [
                    self.round_s(runs, treatments)
                    for others in product((AGAIN, SENT, KEPT), repeat=len(runs) - 1)
                    for treatments in [(*others, KEPT)]
                    if self.bytes_of(runs, treatments) <= memory
                ]
        return min(found)

    def ours_s(self, memory: float) -> float:
        """Seconds of a round under our rule: all but what is in the last sub-model is computed again."""
        runs = swapping(self.layers, memory, self.rate, MICROBATCHES).runs
        return self.round_s(runs, (*(AGAIN,) * (len(runs) - 1), KEPT))


def stage(name: str, rate: float, width: int) -> Stage:
    spec = ModelSpec.from_config(ModelConfig(layers=LAYERS, width=width, heads=width // 128, vocab=32000, context=2048))
    gpu = find_device(name)
    assert gpu is not None  # the catalogue has it
    layers = blocks_of(spec, spec.cut(1), 0, TOKENS, Precision.BF16, gpu.flops)
    inner = TOKENS * spec.kept_bytes(0, 2)
    graphs = [TOKENS * spec.embedding_kept_bytes(2), *[inner] * LAYERS, TOKENS * spec.head_kept_bytes(2)]
    return Stage(layers, graphs, rate)


def main() -> None:
    table = Table(title=f"{LAYERS} layers, {MICROBATCHES} microbatches of {TOKENS} tokens, bf16", box=None)
    for header in (
        "GPU",
        "width",
        "forward of a layer",
        "its graph on the bus",
        "all graphs of a round",
        "ours / best, half of the weights fit",
        "all of them",
    ):
        table.add_column(header, justify="left" if header == "GPU" else "right")
    for (name, rate), width in product(GPUS, WIDTHS):
        found = stage(name, rate, width)
        cells = [f"{found.layers[1].forward_s * 1e3:.1f} ms", f"{found.graphs[1] / rate * 1e3:.1f} ms"]
        cells.append(f"{MICROBATCHES * sum(found.graphs) / 2**30:.0f} GiB")
        for share in (0.5, 1.0):
            memory = found.memory(share)
            cells.append(f"{found.ours_s(memory) / found.best_s(memory):.2f}")
        table.add_row(name, str(width), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
