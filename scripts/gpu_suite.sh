#!/usr/bin/env bash
# Everything that needs a GPU: correctness, then the benchmarks whose records are worth keeping.
#
#   scripts/gpu_suite.sh [correctness] [bench] [large]      (no argument: all three)
#
# Each part fits in 10 minutes on one data-centre GPU. Logs and an archive of the records end in
# $OUT (default: gpu_results). PYTHON chooses the interpreter; nothing is installed.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu_results}
PYTHON=${PYTHON:-python3}
PARTS=${*:-correctness bench large}
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
    correctness)
        run correctness "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu tests/models tests/quant tests/attention tests/engine
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
        echo "unknown part $part: choose from correctness bench large" >&2
        exit 2
        ;;
    esac
done

tar -czf "$OUT/records.tar.gz" --exclude='*.log' runs/gpu-* reports/gpu-* 2>/dev/null
exit $failed
