"""A plain PyTorch loop on the same model, batch, precision and checkpointing: prints tokens/s of its steady steps.

``python plain.py CONFIG_JSON SECONDS`` with threads and spinning chosen by the environment, as a user would.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.nn.functional as F

from muletrain.config.schema import RunConfig
from muletrain.data.tokens import TokenCache
from muletrain.model.dropout import Masks
from muletrain.model.stage import Stage, initial_weight
from muletrain.optim.schedule import learning_rate
from muletrain.runs.assemble import RunFacts


def main(config_json: str, seconds: float) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    facts = RunFacts.of(RunConfig.model_validate_json(config_json))
    config, optim = facts.config, facts.config.optimizer
    source = facts.source(TokenCache.build(config.data, facts.spec.vocab))
    spec, seed = facts.spec, config.train.seed
    model = Stage(spec, None, spec.cut(1))
    model.bind({name: initial_weight(spec, name, shape, seed) for name, shape in model.shapes().items()})
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    microbatches = int(os.environ.get("PLAIN_MICROBATCHES", config.microbatches))
    step, begin, counted = 0, time.perf_counter(), 0
    while True:
        now = time.perf_counter()
        if step == 3:
            begin, counted = now, 0
        elif step > 3 and now - begin > seconds:
            break
        adamw.zero_grad()
        merged = config.microbatches // microbatches
        for index in range(0, config.microbatches, merged):
            pairs = [source.microbatch(step, index + k) for k in range(merged)]
            inputs = torch.cat([torch.from_numpy(a) for a, _ in pairs])
            targets = torch.cat([torch.from_numpy(b) for _, b in pairs])
            logits = model(inputs, Masks(config.train.seed, step, index))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / microbatches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip or float("inf"))
        for group in adamw.param_groups:
            group["lr"] = learning_rate(optim, step, config.train.steps)
        adamw.step()
        step += 1
        counted += config.train.batch * facts.spec.context
    print(json.dumps({"tokens_per_s": counted / (time.perf_counter() - begin), "steps": step}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
