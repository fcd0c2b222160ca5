"""Planned hubs on drawn fleets. compare.py OUT FIRST-LAST [KINDS]"""
import importlib.util, json, random, sys, tempfile, time
from pathlib import Path
import numpy as np

WC = Path("/tmp/wc-base/draws")

def module(name):
    spec = importlib.util.spec_from_file_location(name, WC / f"{name}.py")
    m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m); return m

hubs, plans, alloc = module("agree"), module("planrun"), module("allocdraw")
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.model.spec import ModelSpec
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan.question import Question

def question(kind, seed):
    if kind == "hub":
        text, run = hubs.drawn(seed)
    elif kind == "plan":  # benchmarks/plan, each entry unreliable with 1/2, the first one stays
        text, run = plans.draw(seed), list(plans.RUN)
        rng, parts = random.Random(f"hub plan/{seed}"), text.split("[[machines]]\n")
        text = parts[0] + "".join(f"[[machines]]\nreliable = {'true' if n == 0 or rng.random() < 0.5 else 'false'}\n{p}" for n, p in enumerate(parts[1:]))
        run = [r for r in run if not r.startswith("train.microbatch")]
    else:
        task, names = alloc.fleet(alloc.KINDS[seed % 6], seed // 6)
        N = len(names)
        rows = ["name = 'drawn'"]
        for n in range(N):
            rows.append(f"[[machines]]\nname='m{n}'\nregion='r{n}'\ndevice='{names[n]}'\nreliable={'true' if task['reliable'][n] else 'false'}")
        rtt = (task["delay"] + task["delay"].T)
        rows.append("[matrix]\nregions=" + json.dumps([f"r{n}" for n in range(N)]) + "\nrtt_ms=" + json.dumps(rtt.tolist()) + "\nbandwidth_mbps=" + json.dumps((1000 * task["gbps"]).tolist()))
        text, run = "\n".join(rows), ["model.preset=llama-7b", "train.batch=64", "checkpoint.every=0"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as f:
        f.write(text); f.flush(); fleet = load_fleet(Path(f.name))
    config = load_config(None, run)
    return Question(fleet, config, ModelSpec.from_config(config.model))

def main():
    out, span = Path(sys.argv[1]), sys.argv[2]
    kinds = sys.argv[3].split(",") if len(sys.argv) > 3 else ["hub", "plan", "alloc"]
    limit = float(sys.argv[4]) if len(sys.argv) > 4 else 15.0
    first, last = map(int, span.split("-"))
    rows = json.loads(out.read_text()) if out.exists() else {}
    for seed in range(first, last + 1):
        for kind in kinds:
            q = question(kind, seed)
            t, c = time.monotonic(), time.process_time()
            p = plan_hub.predict(q, 0, limit)
            row = {"problem": p.problem, "wall_s": round(time.monotonic() - t, 1), "cpu_s": round(time.process_time() - c, 1)}
            if not p.problem:
                row |= {"per_s": p.tokens_per_s, "step_s": p.step_s, "mb": p.microbatch, "hurry": any("time limit" in n for n in p.notes),
                        "stages": "; ".join(f"{e-f}:{len(s.machines)-len(s.clients)}+{len(s.clients)}" for s in p.stages for f, e in [s.layers]),
                        "spares": len(p.spares)}
            rows[f"{kind}/{seed}"] = row
            print(kind, seed, row, flush=True)
            out.write_text(json.dumps(rows, indent=1))
main()
