"""Write lr_schedules.json: learning rates of the schedules of transformers, by schedule and keys."""

from __future__ import annotations

import json

import torch
from transformers import get_scheduler

from tests.golden import DATA

PEAK, STEPS = 3e-4, 25
CASES = [
    ("linear", 4, {}),
    ("cosine", 4, {}),
    ("cosine", 0, {"num_cycles": 1.5}),
    ("cosine_with_restarts", 4, {}),
    ("cosine_with_restarts", 3, {"num_cycles": 3}),
    ("cosine_with_min_lr", 4, {"min_lr": 3e-5}),
    ("polynomial", 4, {}),
    ("polynomial", 0, {"power": 2.0, "lr_end": 1e-5}),
    ("inverse_sqrt", 4, {}),
    ("inverse_sqrt", 0, {}),
    ("warmup_stable_decay", 4, {"num_decay_steps": 7}),
    ("constant_with_warmup", 4, {}),
]
"""(name, number of warm-up steps, lr_scheduler_kwargs)"""


def main() -> None:
    entries = []
    for name, warmup, kwargs in CASES:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
        schedule = get_scheduler(name, optimizer, warmup, STEPS, dict(kwargs))
        rates = []
        for _ in range(STEPS + 1):
            rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        entries.append({"name": name, "warmup_steps": warmup, "kwargs": kwargs, "rates": rates})
    text = json.dumps({"peak": PEAK, "steps": STEPS, "schedules": entries}, indent=1)
    (DATA / "lr_schedules.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
