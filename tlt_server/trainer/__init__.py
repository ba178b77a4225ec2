"""The drafter trainer, `tlt-server train`: keeps a drafter aligned with a target that changes. Nothing imports SGLang.

data/       features off the wire: checked, numbered by target, buffered; prompts to replay
learn/      packs, chains, losses, a training step, its spread over processes and GPUs
publish/    expected accept length, when to publish, drafters as folders, exports

begin.py    the drafter to begin with, where there is none: a server's
start.py    from settings (config.py) to a running service; checkpoint.py: what a killed one resumes from
service.py  the loop: hear, gather, train, judge, publish
servers.py  what servers say on the control link; workers.py, spot.py: which ranks may train now
status.py   status and metrics over HTTP; logbooks.py: TensorBoard, W&B; host.py: lock of the folder, signals
"""
