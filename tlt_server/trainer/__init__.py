"""The drafter trainer: it keeps a drafter aligned with a target that changes. Nothing here imports SGLang.

From features to a better drafter, a module for each step:

    features.py     what a server tapped of the target, and its joining into runs of consecutive tokens
    buffer.py       the runs in memory: bounded, of a few target versions, some kept to judge by
    packing.py      runs side by side, to a budget of tokens
    network.py      the drafters (rope.py, attention.py: their parts)
    chains.py       chains of drafts from every token of a pack at once
    losses.py       what they are compared with
    loop.py         one step of training
    gate.py         the expected accept length of a drafter; policy.py: when it is published
    folder.py       drafters in and out
    checkpoint.py   what a trainer that was killed goes on from
    replay.py       prompts sent through a server, so that there is something to learn from
    spot.py         on which GPUs to train, and when to give them back
    team.py         a step spread over several processes; helper.py: what all but the first of them do

And what makes a process of it, `tlt-server train`:

    config.py       its settings; start.py: from them to a running trainer
    service.py      the loop
    targets.py      one count of the targets that several servers serve
    servers.py      what servers say on the control link; inbox.py: features that they send
    judge.py        the gate at work; published.py: the drafters that passed it
    ranks.py        the processes that torchrun started; workers.py: which of them may train now
    memory.py       a GPU's memory within a budget; parking.py: off it, and back
    status.py       what it shows over HTTP
"""
