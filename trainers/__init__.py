"""Training with DeepSpeed ZeRO: `deepspeed trainers/adv_train.py +model=NAME`.

    adv_train std_train constrain    the scripts; entry.py composes their configuration (configs/), checks it, trains
    settings.py ranks.py seeds.py    typed options; this process among the ranks; named random streams
    model_parts.py                   parts of a model that options speak of: blocks, attention, weights to penalise
    job/         from a configuration to a checked `Job`; compatibility.py: conflicting options; checkpoints' marks
    objectives/  the loss of a micro-batch, one file each
    techniques/  what can be added to any objective: masks of the attack, mixed labels, SAM
    engine/      the one door to DeepSpeed; signals, watchdog, logs
    weights/     checkpoints, the moving average, the hand-over
    steps/       loop.py: a run from its start to its hand-over; step.py: one update, every technique in its order
    certvit/     CertViT: a run, its layers constrained one by one, another run
    doctor/      `python -m trainers.doctor`: what this machine can do, whether a run fits, what it would refuse
    reshape.py   a checkpoint for another number of ranks

Imports go up this list, but for the scripts (tests/test_architecture.py): steps imports weights, certvit imports steps.
"""
