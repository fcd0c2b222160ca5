"""Teach a model on conversations by an adapter (LoRA), with peers on this machine, and ask it something.

pip install 'muletrain[adapters]'
python examples/chat_lora.py Qwen/Qwen3-0.6B chat.jsonl
"""

import sys

import muletrain

model, data, *steps = sys.argv[1:]
run = muletrain.train(
    model=model,
    data={"path": data, "loss_on": "last"},  # Qwen3 writes earlier turns without their thinking
    adapter={"rank": 16},
    train={"steps": int(steps[0])} if steps else {"epochs": 2},
)
print("held-out loss:", run.loss)
print(muletrain.generate(run.folder, "What is two plus two?", tokens=60))
run.export("my-adapter")  # for peft; merge=True writes the whole model
