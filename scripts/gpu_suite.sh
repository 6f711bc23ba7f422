#!/usr/bin/env bash
# Everything that needs a GPU: correctness, then the benchmarks whose records are worth keeping.
#
#   scripts/gpu_suite.sh [PART ...]      (no argument: all of them, in this order)
#
#   kernel-tests  Triton's kernels, compiled: small shapes against the references, then those of real models
#   correctness   the rest of the ladder on the GPU
#   ceilings      what the device can do at most: read and copy bandwidth, matrix rates
#   kernels       each kernel by itself against these, then what it is worth: a workload with and without it
#   waits         what CUDA graphs and overlapping steps are worth, in a batch and alone
#   table         the figures that others quote: batch 1, 256 requests at once, a long prompt, precisions, batching
#   studies       the studies, cut to fit
#
# Each part is meant to fit in 10 minutes on one data-centre GPU, and is cut off after PART_S seconds (default: 560). What
# is known by then is in $OUT (default: gpu_results): a log a part, and an archive of the records, renewed after each
# command. PYTHON chooses the interpreter; nothing is installed.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu_results}
PYTHON=${PYTHON:-python3}
PART_S=${PART_S:-560}
PARTS=${*:-kernel-tests correctness ceilings kernels waits table studies}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
failed=0

run() { # run NAME COMMAND...: add to the log of the part, keep the records, go on after a failure
    local name=$1 log="$OUT/$part.log" left=$((end_s - SECONDS)) code before records
    shift
    echo "== $name: $*" | tee -a "$log"
    if [ "$left" -le 0 ]; then
        echo "   left out: the part has had its $PART_S seconds" | tee -a "$log"
        failed=1
        return
    fi
    before=$(wc -c <"$log")
    timeout --foreground --signal=INT --kill-after=30 "$left" "$@" >>"$log" 2>&1
    code=$?
    tail -c "+$((before + 1))" "$log" | tail -n 25
    if [ $code -ne 0 ]; then
        echo "   failed (exit code $code), see $log" | tee -a "$log"
        failed=1
    fi
    shopt -s nullglob
    records=(runs/gpu-* reports/gpu-*)
    shopt -u nullglob
    [ ${#records[@]} -gt 0 ] || return
    if ! tar -czf "$OUT/.records" --exclude='*.log' "${records[@]}" 2>>"$log" ||
        ! mv "$OUT/.records" "$OUT/records.tar.gz"; then
        echo "   the records could not be archived, see $log" | tee -a "$log"
        rm -f "$OUT/.records"
        failed=1
    fi
}

cells() { # cells NAME OVERRIDES...: a sweep on the GPU with random weights, records under runs/NAME
    local name=$1
    shift
    run "$name" "$PYTHON" run.py -m "sweep.name=$name" runtime.device=cuda model.weights=random \
        measure.timeout_s=240 "$@"
}

sweep() { # sweep NAME OVERRIDES...: the same with the workload `chat`
    cells "$@" workload=chat
}

for part in $PARTS; do
    end_s=$((SECONDS + PART_S))
    : >"$OUT/$part.log"
    case $part in
    kernel-tests)
        run kernel-tests "$PYTHON" -m pytest -q -p no:cacheprovider tests/attention/test_triton.py \
            tests/quant/test_products.py tests/models/test_fused.py tests/gpu/test_kernels.py
        ;;
    correctness)
        run correctness "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_device.py tests/gpu/test_cuda.py \
            tests/gpu/test_graphs.py tests/models tests/quant tests/attention/test_backends.py tests/engine
        ;;
    ceilings)
        run ceilings "$PYTHON" scripts/ceilings.py --device cuda --output "$OUT/ceilings.json"
        ;;
    kernels)
        for model in qwen3 qwen3_8b; do
            run "gpu-kernels-$model" "$PYTHON" run.py preset=kernels "model=$model" runtime.device=cuda \
                "name=gpu-kernels-$model" task.contexts=[512,4096]
        done
        sweep gpu-qwen3-attention model=qwen3 attention=triton,sdpa runtime.fused_kernels=triton,off
        sweep gpu-qwen3-backends model=qwen3 attention=triton,sdpa,flex,torch_varlen cache.block_size=256
        sweep gpu-qwen3-kv model=qwen3 attention=triton,sdpa cache.kv_dtype=auto,int8,fp8
        sweep gpu-qwen3-nf4-kernels model=qwen3 quant=nf4 quant.kernel=triton,bitsandbytes
        sweep gpu-qwen3-int8-kernels model=qwen3 quant=int8,int4 quant.kernel=triton,torch
        sweep gpu-qwen3-invariant model=qwen3 attention=triton,invariant runtime.determinism=batch \
            workload.num_requests=8
        ;;
    waits)
        sweep gpu-qwen3-waits model=qwen3 runtime.cuda_graphs=false,true runtime.overlap=false,true
        sweep gpu-qwen3-waits-batch1 model=qwen3 batching=sequential workload.num_requests=4 \
            runtime.cuda_graphs=false,true runtime.overlap=false,true
        ;;
    table)
        cells gpu-batch1 model=qwen3,qwen3_8b runtime.linear_kernel=torch,triton arrival=concurrency arrival.concurrency=1 \
            workload.num_requests=4 workload.input_len=128 workload.output_len=256
        sweep gpu-256-requests model=qwen3 engine=minivllm,transformers_continuous sweep.skip_absent=true \
            workload.num_requests=256 batching.max_num_seqs=256 \
            workload.input_len.min=100 workload.input_len.max=1024 \
            workload.output_len.min=100 workload.output_len.max=1024
        cells gpu-8b-prompt model=qwen3_8b model.max_model_len=8448 arrival=concurrency arrival.concurrency=1 \
            batching.max_num_batched_tokens=8192 workload.num_requests=4 workload.input_len=8192 workload.output_len=2
        cells gpu-8b-precision model=qwen3_8b quant=bf16,int8,nf4 arrival=concurrency arrival.concurrency=1,16 \
            workload.num_requests=16 workload.input_len=128 workload.output_len=64
        sweep gpu-8b-batching model=qwen3_8b batching=static,continuous batching.max_num_seqs=64 \
            workload.num_requests=128 workload.output_len.min=16 workload.output_len.max=512
        ;;
    studies)
        cells gpu-scaling preset=scaling model=qwen3 model.max_model_len=32768 \
            'sweep.params=[{workload.num_requests: "1,4,16,64,256"}, {workload.input_len: "512,2048,8192,32000"}]'
        cells gpu-batching preset=batching model=qwen3
        cells gpu-chunked-prefill preset=chunked_prefill model=qwen3
        cells gpu-prefix-cache preset=prefix_cache model=qwen3
        cells gpu-concurrency preset=concurrency model=qwen3 workload.num_requests=64
        cells gpu-attention preset=attention model=qwen3 attention=sdpa,triton
        cells gpu-cache model=qwen3 cache=paged,contiguous
        ;;
    *)
        echo "unknown part $part: choose from kernel-tests correctness ceilings kernels waits table studies" >&2
        exit 2
        ;;
    esac
done

exit $failed
