"""``torch.distributed.pipelining`` on the same model and batch: 2 ranks x 1 thread over gloo, GPipe or 1F1B.

``python pipelining.py CONFIG_JSON SECONDS SCHEDULE RANK PORT``; rank 0 prints tokens/s of its steady steps. No fault
tolerance, no checkpoints, one copy of each stage: what a cluster would run.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from muletrain.config.schema import RunConfig
from muletrain.data.tokens import TokenCache
from muletrain.model.stage import Stage, initial_weight
from muletrain.optim.schedule import learning_rate
from muletrain.runs.assemble import RunFacts


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(config_json: str, seconds: float, schedule: str, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    facts = RunFacts.of(RunConfig.model_validate_json(config_json))
    config, optim = facts.config, facts.config.optimizer
    source = facts.source(TokenCache.build(config.data, facts.spec.vocab))
    module = Stage(facts.spec, rank, facts.spec.cut(2))
    module.bind({n: initial_weight(facts.spec, n, s, config.train.seed) for n, s in module.shapes().items()})
    pipe = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](
        PipelineStage(module, rank, 2, torch.device("cpu")), config.microbatches, loss_fn=_loss
    )
    adamw = torch.optim.AdamW(module.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    step, begin, counted = 0, time.perf_counter(), 0
    running = torch.ones(1)
    while running:
        if step == 2:
            begin, counted = time.perf_counter(), 0
        adamw.zero_grad()
        pairs = [source.microbatch(step, index) for index in range(config.microbatches)]
        if rank == 0:
            pipe.step(torch.cat([torch.from_numpy(a) for a, _ in pairs]))
        else:
            pipe.step(target=torch.cat([torch.from_numpy(b) for _, b in pairs]), losses=[])
        norm = torch.stack([p.grad.square().sum() for p in module.parameters() if p.grad is not None]).sum()
        dist.all_reduce(norm)
        scale = min(1.0, (optim.clip or float("inf")) / float(norm.sqrt() + 1e-6))
        for parameter in module.parameters():
            parameter.grad.mul_(scale)  # type: ignore[union-attr]
        for group in adamw.param_groups:
            group["lr"] = learning_rate(optim, step, config.train.steps)
        adamw.step()
        step += 1
        counted += config.train.batch * facts.spec.context
        running.fill_(float(step <= 2 or time.perf_counter() - begin < seconds))
        dist.broadcast(running, 0)
    if rank == 0:
        print(json.dumps({"tokens_per_s": counted / (time.perf_counter() - begin), "steps": step}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
