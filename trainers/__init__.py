"""Training with DeepSpeed ZeRO: `deepspeed trainers/adv_train.py +model=NAME`.

    adv_train std_train constrain    the scripts; entry.py composes their configuration (configs/), checks it, trains
    settings.py ranks.py seeds.py    typed options; the rank of this process; named random streams
    model_parts.py                   parts of a model that options name: blocks, attention, weights to penalise
    callbacks.py                     what hears of a run on rank 0, by name: TensorBoard, W&B, those of packages
    job/         a resolved configuration becomes a checked `Job`; compatibility.py: options that exclude each other
    objectives/  the loss of a micro-batch, one file each
    techniques/  additions to any objective: attack masks, mixed labels, distillation, SAM
    engine/      the only module that imports DeepSpeed; signals, watchdog, logs
    weights/     checkpoints, the moving average, the hand-over
    steps/       loop.py: a run from its start to its hand-over; step.py: one update, every technique in order
    certvit/     CertViT: train, constrain the layers one by one, train again
    doctor/      `python -m trainers.doctor`: what this machine can do, whether a run fits, what would be refused

Modules import only modules listed above them, except the scripts (tests/test_architecture.py).
"""
