"""Check an installation with `python -m paddlenlp_ext.doctor` (docs/gpu.md).

environment.py             versions, devices, flags
devices_and_dtypes.py      targets of the checks: pairs of a device and a dtype
backends.py                backend of each op on each target, and why faster backends are unavailable
op_checks/                 comparison of each backend of each op with the reference on the CPU
training_checks.py         two training steps of each method and precision (tiny_run.py)
generation_checks.py       decoding with a KV cache
parallel_layout_checks.py  training on two processes, in each parallel layout
run_doctor.py              order, progress and time limit of the checks
report.py                  the report in Markdown
"""
