#!/bin/sh
# NOT RUN: no GPU was at hand. vLLM and SGLang, plain and with a draft model, on a machine with one, under the load of
# `slipstream bench`, with which Slipstream itself is then measured. Install each in an environment of its own.
#
# usage: sh benchmarks/peers/gpu.sh vllm|sglang|slipstream|slipstream-vllm TARGET DRAFT PROMPTS OUT
# (folders or hub ids; OUT: a folder; slipstream-vllm: our verifier on vLLM, of the interpreter SLIPSTREAM_VLLM_PYTHON)
set -eu
system=$1 target=$2 draft=$3 prompts=$4 out=$5
port=8100
mkdir -p "$out"

start() { # NAME: the server of this arm, in the background
    case $1 in
    vllm-plain) vllm serve "$target" --port $port --no-enable-prefix-caching & ;;
    vllm-draft) vllm serve "$target" --port $port --no-enable-prefix-caching \
        --speculative-config "{\"method\": \"draft_model\", \"model\": \"$draft\", \"num_speculative_tokens\": 4}" & ;;
    sglang-plain) python -m sglang.launch_server --model-path "$target" --port $port --disable-radix-cache & ;;
    sglang-draft) python -m sglang.launch_server --model-path "$target" --port $port --disable-radix-cache \
        --speculative-algorithm STANDALONE --speculative-draft-model-path "$draft" --speculative-num-steps 4 \
        --speculative-eagle-topk 1 --speculative-num-draft-tokens 5 & ;;
    slipstream) slipstream serve --target "$target" --draft "$draft" --http 127.0.0.1:$port & ;;
    slipstream-vllm) slipstream serve --engine vllm --target "$target" --draft "$draft" --http 127.0.0.1:$port & ;;
    esac
    server=$!
    until curl -sf "http://127.0.0.1:$port/v1/models" >/dev/null; do
        kill -0 $server
        sleep 2
    done
}

measure() { # NAME WHICH: 1, 6 and 16 at once
    start "$1"
    for at_once in 1 6 16; do
        slipstream bench "$prompts" --http "http://127.0.0.1:$port" --model "${3-$target}" --compare "$2" \
            --concurrency $at_once --repeats 3 --html "$out/$1-$at_once.html" --json >"$out/$1-$at_once.json"
    done
    kill $server
    wait $server || true
}

case $system in
slipstream | slipstream-vllm) measure "$system" both "" ;;
vllm | sglang)
    measure "$system-plain" on
    measure "$system-draft" on
    ;;
*)
    echo "unknown system $system" >&2
    exit 2
    ;;
esac
