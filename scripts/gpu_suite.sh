#!/usr/bin/env bash
# Everything that needs a GPU: correctness, then the benchmarks whose records are worth keeping.
#
#   scripts/gpu_suite.sh [CALL | PART[:SECONDS] ...]      (no argument: all parts, in this order; hours)
#
# The first quarter of an hour on a GPU is three calls, one right after the other (`make gpu`: all of them at once):
#   first     240 s: is everything there; Qwen3-0.6B in NF4 with continuous batching and its page; if that fails, why
#   second    280 s: more tests, batch 1 by precision, an ablation, a ladder of batch sizes
#   third     160 s: 256 requests at once, fp8, CUDA graphs on and off
# The parts of these calls have limits of their own, below. They are estimates: nothing here has run on a GPU yet.
#
#   environment   installs WHEELS (scripts/gpu_wheels.py) where they lie; what is there; a missing package ends the suite
#   compile       Triton's kernels for the shapes of Qwen3-0.6B and 8B, by all cores at once, into the cache that all use
#   logits        the embedded model's logits by every kernel beside torch's, before any kernel is timed
#   mission       Qwen3-0.6B, NF4, continuous batching, a load of about ten seconds, twice
#   formats       the same in bf16 and int8
#   plain         the same without our kernels and without graphs: whether it works tells which part is wrong
#   kernel-tests  Triton's kernels, compiled: those of real models' shapes, then small ones against the references
#   tests         the rest of the ladder, as far as it uses the GPU; that drafts change no token, in graphs of their own
#   batch1        one request at a time: Qwen3-8B and 0.6B, bf16 and NF4
#   leave-out     an ablation in one block: Qwen3-0.6B without the fused kernels, and without overlapping steps
#   ladder        1 to 256 requests at once
#   many          256 requests at once, prompts first
#   fp8           fp8 with CUDA graphs and without
#   graphs        one request at a time with CUDA graphs and without
#   ceilings      what the device can do at most: read and copy bandwidth, matrix rates
#   table         the figures that others quote: batch 1, a long prompt
#   precision     four and eight bits against sixteen, and the other kernel for sixteen
#   activations   activations in 8 bits beside those in 16: 16 at once, and a long prompt
#   batching      batch 64: continuous against static batching, on two sets of lengths; the gap between decoding steps
#   peer          256 requests at once, beside transformers' continuous batching
#   scaling       what a step costs as requests and context grow
#   kernels       each kernel by itself against these ceilings: products in every format, decoding, verification of drafts
#   experts       a mixture of experts, one after another and grouped
#   waits         what CUDA graphs, overlapping steps and compiled layers are worth
#   ablation      what each optimisation is worth beside the others: over three calls, each goes on where the last ended
#   backends      attention, cache and product kernels, a workload with and without each
#   speculation   when drafts pay; that they change no token is among the tests
#   studies       the other studies
#
# A part ends after its seconds, else after PART_S (default: 560); with CALL_S, all of them together after so many. What runs
# then is interrupted, and has 20 seconds to end; a failed command does not stop the others. So it is when the suite itself is
# sent TERM, INT or HUP. What is known by then is in $OUT (default: gpu_results): results.tar.gz, renewed after each command
# and every KEEP_S seconds (default: 60) of one, has all logs, records and pages of this call, above MOST_BYTES in pieces
# (cat results.tar.gz.* | tar -xz); traces.tar.gz the profiler's; suite.log what was printed; targets.md, after each part,
# what was aimed at beside what all records below runs/ say (scripts/gpu_targets.py). AZURE_TRACE is the path of
# AzureLLMInferenceTrace_conv.csv (docs/guides/traces.md); without it, what needs it is left out. TESTERS is how many
# processes test at once (default: 8; compiling is most of it).
set -uo pipefail
cd "$(dirname "$0")/.."
FIRST="environment:25 compile:25 logits:25 mission:60 formats:40 plain:25 kernel-tests:30"
SECOND="environment:20 tests:65 batch1:80 leave-out:70 ladder:35"
THIRD="environment:20 many:45 fp8:45 graphs:40"
ALL="environment compile logits mission formats plain kernel-tests tests batch1 leave-out ladder many fp8 graphs ceilings table precision activations batching peer scaling kernels experts waits ablation backends speculation studies"
OUT=${OUT:-gpu_results}
WORK=${WORK:-build/gpu_suite} # logs, and what no sweep records
WHEELS=${WHEELS:-build/wheels}
SITE=build/gpu_site # where they are installed
PYTHON=${PYTHON:-python3}
PART_S=${PART_S:-560}
CALL_S=${CALL_S:-}
KEEP_S=${KEEP_S:-60}
TESTERS=${TESTERS:-8}
MOST_BYTES=${MOST_BYTES:-16000000}
TIMEOUT_S=240 # of a measurement
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/$SITE${PYTHONPATH:+:$PYTHONPATH}"
PARTS='' seconds=0
for part in ${*:-$ALL}; do # before any of them takes its time
    case "$part" in
    first) PARTS+=" $FIRST" seconds=$((seconds + 240)) ;;
    second) PARTS+=" $SECOND" seconds=$((seconds + 280)) ;;
    third) PARTS+=" $THIRD" seconds=$((seconds + 160)) ;;
    *)
        case " $ALL " in
        *" ${part%%:*} "*) PARTS+=" $part" ;;
        *)
            echo "unknown part ${part%%:*}: choose from first second third, or $ALL" >&2
            exit 2
            ;;
        esac
        ;;
    esac
done
[ -n "$CALL_S" ] || [ "$seconds" -eq 0 ] || CALL_S=$seconds
mkdir -p "$OUT" "$WORK"
rm -f "$WORK"/* "$OUT"/suite.log
failed=0 stopped='' child='' names=()

stop() { # whoever ends the suite has what is known: the command that runs is interrupted, no other begins
    stopped='the suite was ended'
    [ -z "$child" ] || kill -INT "$child" 2>/dev/null
}
trap stop TERM INT HUP

say() { # a line for whoever watches, and into the log of the part
    echo "$1" | tee -a "$log" "$OUT/suite.log"
}

put() { # put NAME TAR-ARGUMENTS...: an archive in $OUT, in place of the one before; where it cannot be made, that stays
    local made="$OUT/.$1"
    tar -czf "$made" "${@:2}" 2>>"$WORK/archive.log" || { rm -f "$made" && return 1; }
    if [ "$(wc -c <"$made")" -le "$MOST_BYTES" ]; then
        mv "$made" "$OUT/$1" && rm -f "$OUT/$1".[0-9]
    else
        split -b "$MOST_BYTES" -d -a 1 "$made" "$OUT/$1." && rm -f "$made" "$OUT/$1"
    fi
}

archive() { # everything so far; a trace is larger than all else, and apart
    local known records=("$WORK") traces=()
    for known in "${names[@]}"; do # only what this call has made
        [ ! -e "runs/$known" ] || records+=("runs/$known")
        [ ! -e "reports/$known" ] || records+=("reports/$known")
    done
    while IFS= read -r known; do traces+=("$known"); done < <(find "${records[@]}" -name trace.json.gz)
    [ ${#traces[@]} -eq 0 ] || put traces.tar.gz "${traces[@]}"
    put results.tar.gz --exclude=run.log --exclude=trace.json.gz "${records[@]}"
}

keep() { # keep PID: archive every KEEP_S seconds, for whoever kills all of this at once; a file may just be written
    local nap=''
    trap '[ -z "$nap" ] || kill "$nap"; exit' TERM
    while kill -0 "$1" 2>/dev/null; do
        sleep "$KEEP_S" &
        nap=$!
        wait "$nap"
        archive
    done
}

run() { # run NAME COMMAND...: add to the log of the part, keep the records, go on after a failure; returns the exit code
    local name=$1 left=$((end_s - SECONDS)) code before keeper
    shift
    say "== $name (at ${SECONDS} s, at most $left s): $*"
    if [ "$left" -le 0 ] || [ -n "$stopped" ]; then
        say "   left out: the time is over"
        failed=1
        return 1
    fi
    before=$(wc -c <"$log")
    names+=("$name")
    timeout --foreground --signal=INT --kill-after=20 "$left" "$@" >>"$log" 2>&1 &
    child=$!
    [ -z "$stopped" ] || stop
    keep "$child" >/dev/null 2>&1 &
    keeper=$!
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal to the suite has ended the waiting
        wait "$child"
        code=$?
    done
    child=''
    kill "$keeper" 2>/dev/null
    wait "$keeper"
    tail -c "+$((before + 1))" "$log" | tail -n 25 | tee -a "$OUT/suite.log"
    if [ $code -ne 0 ]; then
        say "   failed (exit code $code), see $log"
        failed=1
    fi
    if ! archive; then
        say "   what is known could not be archived, see $WORK/archive.log"
        failed=1
    fi
    return $code
}

collate() { # what was aimed at beside all records that there are; of no part, so that it fails none
    timeout 20 "$PYTHON" scripts/gpu_targets.py --output "$OUT/targets.md" >>"$log" 2>&1 ||
        say "== targets: could not be collated, see $log"
}

without() { # without VARIABLE NAME: say that a command is left out, for want of what the variable names
    say "== $2: left out, since $1 is not set"
}

tests() { # tests NAME PATH...: so many at once; what takes longest is told
    local name=$1
    shift
    # They are many: none of them should compile with many more processes.
    run "$name" env TORCHINDUCTOR_COMPILE_THREADS=2 "$PYTHON" -m pytest -q -p no:cacheprovider -n "$TESTERS" \
        --dist worksteal --durations=15 "$@"
}

cells() { # cells NAME OVERRIDES...: a sweep on the GPU with random weights, records under runs/NAME
    local name=$1
    shift
    run "$name" "$PYTHON" run.py -m "sweep.name=$name" runtime.device=cuda model.weights=random \
        "measure.timeout_s=$TIMEOUT_S" "$@"
}

sweep() { # sweep NAME OVERRIDES...: the same with the workload `chat`
    cells "$@" workload=chat
}

alone() { # alone NAME OVERRIDES...: one request at a time, whose 256 tokens after the first tell the step (tpot_ms)
    cells "$1" batching.max_num_seqs=1 model.max_model_len=1024 arrival=concurrency arrival.concurrency=1 \
        workload.num_requests=4 workload.input_len=128 workload.output_len=257 measure.repeats=3 "${@:2}"
}

long_prompt() { # long_prompt NAME OVERRIDES...: Qwen3-8B, prompts of 8,192 tokens in a step each
    cells "$@" model=qwen3_8b model.max_model_len=8448 arrival=concurrency arrival.concurrency=1 batching.max_num_seqs=1 \
        batching.max_num_batched_tokens=8192 workload.num_requests=4 workload.input_len=8192 workload.output_len=2
}

LONG="workload.input_len.min=100 workload.input_len.max=1024 workload.output_len.min=100 workload.output_len.max=1024"
# About ten seconds at 13,000 tokens/s.
FILL="workload.num_requests=512 workload.input_len=128 workload.output_len=256 model.max_model_len=512"

for part in $PARTS; do
    seconds=$PART_S
    case "$part" in *:*) seconds=${part##*:} ;; esac
    part=${part%%:*} log="$WORK/${part%%:*}.log"
    if [ -n "$stopped" ] || { [ -n "$CALL_S" ] && [ "$SECONDS" -ge "$CALL_S" ]; }; then
        echo "== $part: left out: ${stopped:-the time of the call is over}" | tee -a "$OUT/suite.log"
        failed=1
        continue
    fi
    end_s=$((SECONDS + seconds))
    [ -z "$CALL_S" ] || [ "$end_s" -le "$CALL_S" ] || end_s=$CALL_S
    : >"$log"
    case $part in
    environment)
        mkdir -p "$SITE"
        [ ! -d "$WHEELS" ] || run wheels "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$SITE" "$WHEELS"/*.whl
        run environment "$PYTHON" scripts/gpu_environment.py || stopped='something is missing, see environment'
        ;;
    compile)
        run compile "$PYTHON" scripts/gpu_compile.py --models qwen3 qwen3_8b
        ;;
    logits)
        run logits "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_logits.py
        ;;
    mission)
        # shellcheck disable=SC2086
        run gpu-mission "$PYTHON" run.py name=gpu-mission runtime.device=cuda model=qwen3 model.weights=random quant=nf4 \
            batching=continuous "measure.timeout_s=$TIMEOUT_S" measure.repeats=2 $FILL
        ;;
    formats)
        # shellcheck disable=SC2086
        cells gpu-formats model=qwen3 quant=bf16,int8 $FILL
        ;;
    plain)
        # shellcheck disable=SC2086
        cells gpu-plain model=qwen3 quant=nf4 quant.kernel=bitsandbytes attention=sdpa runtime.cuda_graphs=false \
            runtime.fused_kernels=off $FILL workload.num_requests=64
        ;;
    kernel-tests)
        tests kernel-tests tests/gpu/test_kernels.py tests/attention/test_triton.py tests/quant/kernels/test_products.py \
            tests/quant/kernels/test_narrow.py tests/passes/test_fused.py tests/engine/test_sampling_kernels.py
        ;;
    tests)
        tests tests tests/gpu/test_graphs.py tests/gpu/test_cuda.py tests/gpu/test_faces.py tests/gpu/test_device.py \
            tests/gpu/test_profile.py tests/gpu/test_ranks.py tests/passes/test_order.py tests/tasks/test_kernels.py
        ;;
    batch1)
        alone gpu-first-batch1 model=qwen3_8b,qwen3 quant=bf16,nf4 runtime.overlap=true measure.repeats=1
        ;;
    leave-out)
        # What the others turn on is on in all arms.
        sweep gpu-leave-out +ablation=leave_one_out optimisations=gpu 'ablation.only=[fused_kernels,overlap]' model=qwen3 \
            model.max_model_len=1024 quant=bf16 attention=auto cache=paged batching=continuous batching.chunked_prefill=true \
            runtime.cuda_graphs=auto measure.roofline=false
        ;;
    ladder)
        cells gpu-ladder model=qwen3 model.max_model_len=512 batching.max_num_seqs=256 workload.num_requests=1,16,64,256 \
            workload.input_len=128 workload.output_len=128
        ;;
    many)
        # shellcheck disable=SC2086
        sweep gpu-many model=qwen3 runtime.overlap=true batching.max_num_batched_tokens=16384 batching.prefill_first=true \
            batching.max_num_seqs=256 workload.num_requests=256 $LONG model.max_model_len=2048
        ;;
    fp8)
        cells gpu-fp8 model=qwen3 quant=fp8 runtime.cuda_graphs=true,false model.max_model_len=512 \
            workload.num_requests=64 workload.input_len=128 workload.output_len=128
        ;;
    graphs)
        alone gpu-graphs model=qwen3 runtime.cuda_graphs=true,false runtime.overlap=true measure.repeats=1
        ;;
    ceilings)
        run ceilings "$PYTHON" scripts/ceilings.py --device cuda --output "$WORK/ceilings.json"
        ;;
    table)
        # With overlap tokens come as fast as they can; without it the phases of a step are its own.
        alone gpu-batch1 model=qwen3_8b,qwen3 runtime.overlap=true,false
        long_prompt gpu-8b-prompt measure.repeats=3
        ;;
    precision)
        cells gpu-8b-precision model=qwen3_8b model.max_model_len=1024 runtime.overlap=true quant=bf16,int8,nf4 \
            arrival=concurrency arrival.concurrency=1,16 batching.max_num_seqs=16 \
            workload.num_requests=16 workload.input_len=128 workload.output_len=129 measure.repeats=2
        alone gpu-batch1-triton model=qwen3_8b,qwen3 runtime.overlap=true runtime.linear_kernel=triton
        ;;
    activations)
        cells gpu-8b-activations model=qwen3_8b model.max_model_len=1024 runtime.overlap=true quant=int8,int4 \
            quant.activations=none,int8 arrival=concurrency arrival.concurrency=16 batching.max_num_seqs=16 \
            workload.num_requests=16 workload.input_len=128 workload.output_len=129 measure.repeats=2
        long_prompt gpu-8b-prompt-activations measure.repeats=2 \
            'sweep.params=[{quant: bf16}, {quant: "int8,int4", quant.activations: int8}]'
        ;;
    batching)
        # What counts is the steady window: a run ends with a batch that drains, however it is batched.
        # shellcheck disable=SC2086
        sweep gpu-8b-batching model=qwen3_8b model.max_model_len=2048 runtime.overlap=true batching=continuous,static \
            batching.max_num_seqs=64 workload.num_requests=256 $LONG measure.repeats=2
        if [ -n "${AZURE_TRACE:-}" ]; then
            cells gpu-8b-batching-azure model=qwen3_8b runtime.overlap=true batching=continuous,static \
                batching.max_num_seqs=64 arrival=offline workload=trace "workload.path=$AZURE_TRACE" \
                workload.num_requests=256 workload.too_long=skip measure.repeats=2
        else
            without AZURE_TRACE gpu-8b-batching-azure
        fi
        # All 64 are admitted in one step and end together, so that every decoding step is of 64. With overlap the GPU
        # works on in the host's gap (breakdown.gap_ms): its own, from a step's last kernel to the next one's first, is
        # beside the trace. Each block is traced in a process of its own; without overlap it would be as many again.
        cells gpu-gap model=qwen3_8b,qwen3 model.max_model_len=1024 runtime.overlap=true runtime.profile=true \
            batching.max_num_seqs=64 batching.max_num_batched_tokens=8192 workload.num_requests=64 \
            workload.input_len=128 workload.output_len=257 measure.repeats=2
        ;;
    peer)
        # Ours first, and with prompts first and in wide steps, as nano-vllm's are: few steps are of both kinds or without
        # a graph. The peer knows neither that nor overlap; its steps are as wide as it chooses itself where nobody does.
        # sdpa is the best of its kernels that come with torch. It takes a mask, so that a step multiplies every query by
        # the keys of all requests: about 0.1 s where 256 decode. So neither graphs nor asynchronous steps, which
        # transformers turns off where there is a mask, would tell; flash-attn, which takes none, is not here. A block is
        # about two minutes, its warm-up of a full batch included.
        ours='{runtime.overlap: "true,false", batching.max_num_batched_tokens: 16384, batching.prefill_first: true}'
        theirs='{engine: transformers_continuous, cache.memory_fraction: 0.8, batching.max_num_batched_tokens: 8192}'
        # shellcheck disable=SC2086
        TIMEOUT_S=420 sweep gpu-256-requests "sweep.params=[$ours, $theirs]" sweep.skip_absent=true model=qwen3 \
            batching.max_num_seqs=256 workload.num_requests=256 $LONG model.max_model_len=2048 measure.repeats=2
        ;;
    scaling)
        cells gpu-scaling preset=scaling model=qwen3 model.max_model_len=32768 measure.repeats=2 \
            'sweep.params=[{workload.num_requests: "1,4,16,64,256"}, {workload.input_len: "512,2048,8192,32000"}]'
        ;;
    kernels)
        for model in qwen3_8b qwen3; do
            run "gpu-kernels-$model" "$PYTHON" run.py preset=kernels "model=$model" runtime.device=cuda \
                "name=gpu-kernels-$model" task.contexts=[512,4096] task.repeats=7 task.sample_ms=5
        done
        # Of this one the mixture is what the others lack: the rest is cut short.
        run gpu-kernels-experts "$PYTHON" run.py preset=kernels model=qwen3_30b_a3b runtime.device=cuda \
            name=gpu-kernels-experts task.rows=[1,16,64] task.contexts=[512] task.formats=[bf16] task.repeats=7 \
            task.sample_ms=5
        ;;
    experts)
        # 61 GB of weights: the cache has a size of its own, which does not go by what loading leaves free.
        cells gpu-experts model=qwen3_30b_a3b quant=bf16 runtime.moe=loop,grouped model.max_model_len=1024 \
            cache.num_blocks=512 arrival=concurrency arrival.concurrency=1,16 batching.max_num_seqs=16 \
            workload.num_requests=16 workload.input_len=128 workload.output_len=65
        ;;
    waits)
        cells gpu-8b-waits model=qwen3_8b model.max_model_len=1024 runtime.cuda_graphs=false,true runtime.overlap=false,true \
            batching.max_num_seqs=64 workload.num_requests=64 workload.input_len=128 workload.output_len=129
        alone gpu-qwen3-waits-batch1 model=qwen3 runtime.cuda_graphs=false,true runtime.overlap=false,true
        # Compiled layers do without the fused kernels and compute all rows of the last one: beside them are layers without
        # either, and those with the kernels.
        plain='{runtime.fused_kernels: "off", runtime.compile: "false,true"}'
        long_prompt gpu-8b-compile "sweep.params=[$plain, {runtime.fused_kernels: triton}]" runtime.cuda_graphs=false \
            runtime.trim_last_layer=false
        ;;
    ablation)
        sweep gpu-ablation +ablation=leave_one_out optimisations=gpu model=qwen3 model.max_model_len=1024 \
            'ablation.only=[kv_cache,continuous,fused_attention,fused_kernels,cuda_graphs,overlap]' measure.repeats=8 \
            measure.roofline=false
        ;;
    backends)
        # Graphs are for attention=triton alone: without them what differs is the kernel.
        sweep gpu-qwen3-attention model=qwen3 attention=triton,sdpa runtime.fused_kernels=triton,off \
            runtime.cuda_graphs=false
        sweep gpu-qwen3-kv model=qwen3 attention=triton,sdpa cache.kv_dtype=auto,int8,fp8 runtime.cuda_graphs=false
        sweep gpu-qwen3-int8-kernels model=qwen3 quant=int8,int4 quant.kernel=triton,torch
        sweep gpu-qwen3-nf4-kernels model=qwen3 quant=nf4 quant.kernel=triton,bitsandbytes
        sweep gpu-qwen3-invariant model=qwen3 attention=triton,invariant runtime.determinism=batch \
            workload.num_requests=8
        sweep gpu-qwen3-backends model=qwen3 attention=triton,sdpa,flash cache.block_size=256 runtime.cuda_graphs=false
        ;;
    speculation)
        # Of the preset the map of where drafts break even; all of it is 100 cells.
        given='speculative: draft, speculative.num_speculative_tokens: 4, speculative.acceptance: "0.5,0.75,1"'
        loads='workload.num_requests: "1,8,32"'
        cells gpu-speculation preset=speculation model=qwen3 model.max_model_len=1024 measure.repeats=2 \
            "sweep.params=[{speculative: none, $loads}, {$given, speculative.adaptive: \"false\", $loads}]"
        ;;
    studies)
        cells gpu-batching preset=batching model=qwen3
        cells gpu-chunked-prefill preset=chunked_prefill model=qwen3
        cells gpu-prefix-cache preset=prefix_cache model=qwen3
        cells gpu-concurrency preset=concurrency model=qwen3 workload.num_requests=64
        cells gpu-attention preset=attention model=qwen3 attention=sdpa,triton runtime.cuda_graphs=false
        cells gpu-cache model=qwen3 cache=paged,contiguous
        ;;
    esac
    collate
done

exit $failed
