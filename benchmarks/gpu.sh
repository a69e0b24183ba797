#!/bin/sh
# All that wants a GPU, the most wanted first. A step that fails or is cut off leaves what the others have written; run it
# from the project's folder, in its environment:
#
#   sh benchmarks/gpu.sh SHARDS        # the folder of CIFAR-10's shards; results: benchmarks/results, runs/gpu
set -u
SHARDS=${1:?"sh benchmarks/gpu.sh SHARDS, the folder of the shards of CIFAR-10"}
EPS='[0.02,0.05,0.1,0.1411764705882353,0.25,0.2823529411764706,0.4235294117647059]'

step() {
    echo "== $*"
    "$@" || echo "FAILED ($?): $*"
}

# What is promised of a GPU: 5 minutes.
step python -m pytest -m gpu tests/test_gpu.py

# A certified training, 9 minutes of an H200, and its certificate, 9 minutes and 8 GB a process; each goes on where it was
# cut off.
step deepspeed --num_gpus 1 trainers/adv_train.py +model=cert_gpsa_vit_c10_gpu data=cifar10 data.root="$SHARDS" name=gpu \
    resume=auto certify.enabled=false registry.enabled=false
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
step python -m certify handover=runs/gpu/handover data=cifar10 data.root="$SHARDS" device=cuda workers=8 \
    batch_size=63 method=best images=1000 eps="$EPS" headline_eps=0.1411764705882353 attack.steps=100

# Tables of papers, three seeds: 15 trainings side by side (on a GPU not run yet).
for table in table2_small table1_small lofast_table1; do
    step python -m benchmarks.experiments $table --at-once 15 data.root="$SHARDS"
done

# A training step against its bare passes, an H100's peak in bf16.
step python -m benchmarks.bench_train_step --model spec_vit_b --batch 128 --precision bf16 --compile --peak-tflops 989
step python -m benchmarks.bench_train_step --model spec_vit_b --batch 256 --precision bf16 --compile --peak-tflops 989

# VNN-COMP 2023, `vit`: $VNNCOMP is benchmarks/vit of vnncomp2023_benchmarks. 100 s a property, at most 6 hours; it resumes.
if [ -n "${VNNCOMP:-}" ]; then
    step python -m benchmarks.vnncomp_vit "$VNNCOMP" --decide 100 --device cuda --rows runs/gpu/vnncomp_vit.jsonl \
        --record vnncomp_vit_linear_cuda
fi

# The rest.
step python -m benchmarks.bench_ladder --device cuda
step python -m benchmarks.bench_ladder --model dp_vit_s --device cuda
step python -m benchmarks.bench_msvp_step --batch 128
step python -m benchmarks.bench_attacks --model dp_vit_b --img-size 224 --patch-size 16 --depth 12 --batch 32 --pairs 4
