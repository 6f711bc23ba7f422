#!/usr/bin/env bash
# Everything that needs a GPU: correctness, then the benchmarks whose records are worth keeping.
#
#   scripts/gpu_suite.sh [PART ...]      (no argument: all of them, in this order)
#
#   kernel-tests  Triton's kernels, compiled: small shapes against the references, then those of real models
#   correctness   the rest of the ladder on the GPU
#   kernels       what each kernel is worth: the same workload with and without it
#   bench         precisions and caches on Qwen3 0.6B
#   large         precisions on Qwen3 8B
#
# Each part fits in 10 minutes on one data-centre GPU. Logs and an archive of the records end in
# $OUT (default: gpu_results). PYTHON chooses the interpreter; nothing is installed.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu_results}
PYTHON=${PYTHON:-python3}
PARTS=${*:-kernel-tests correctness kernels bench large}
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"
failed=0

run() { # run NAME COMMAND...: log to $OUT/NAME.log, go on after a failure
    local name=$1
    shift
    echo "== $name: $*"
    if ! "$@" >"$OUT/$name.log" 2>&1; then
        echo "   failed, see $OUT/$name.log"
        failed=1
    fi
    tail -n 25 "$OUT/$name.log"
}

sweep() { # sweep NAME OVERRIDES...: a sweep on the GPU with random weights, records under runs/NAME
    local name=$1
    shift
    run "$name" "$PYTHON" run.py -m "sweep.name=$name" runtime.device=cuda model.weights=random \
        workload=chat measure.timeout_s=240 "$@"
}

for part in $PARTS; do
    case $part in
    kernel-tests)
        run kernel-tests "$PYTHON" -m pytest -q -p no:cacheprovider tests/attention/test_triton.py \
            tests/quant/test_products.py tests/models/test_fused.py tests/gpu/test_kernels.py
        ;;
    correctness)
        run correctness "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_cuda.py tests/models tests/quant \
            tests/attention/test_backends.py tests/engine
        ;;
    kernels)
        sweep gpu-qwen3-attention model=qwen3 attention=triton,sdpa runtime.fused_kernels=triton,off
        sweep gpu-qwen3-backends model=qwen3 attention=triton,sdpa,flex,torch_varlen cache.block_size=256
        sweep gpu-qwen3-kv model=qwen3 attention=triton,sdpa cache.kv_dtype=auto,int8,fp8
        sweep gpu-qwen3-nf4-kernels model=qwen3 quant=nf4 quant.kernel=triton,bitsandbytes
        sweep gpu-qwen3-int8-kernels model=qwen3 quant=int8,int4 quant.kernel=triton,torch
        sweep gpu-qwen3-invariant model=qwen3 attention=triton,invariant runtime.determinism=batch \
            workload.num_requests=8
        ;;
    bench)
        sweep gpu-qwen3-precision model=qwen3 quant=bf16,fp16,int8,int8_mixed,nf4 batching=sequential,continuous
        sweep gpu-qwen3-cache model=qwen3 cache=paged,contiguous attention=sdpa,eager
        ;;
    large)
        sweep gpu-qwen3-8b-precision model=qwen3_8b quant=bf16,int8,nf4 workload.num_requests=16
        sweep gpu-qwen3-8b-batch1 model=qwen3_8b batching=sequential workload.num_requests=2 quant=bf16,int8,nf4
        ;;
    *)
        echo "unknown part $part: choose from kernel-tests correctness kernels bench large" >&2
        exit 2
        ;;
    esac
done

tar -czf "$OUT/records.tar.gz" --exclude='*.log' runs/gpu-* reports/gpu-* 2>/dev/null
exit $failed
