#!/bin/sh
# Two public load tools, each in an environment of its own, against a server that runs (`slipstream serve`):
#   sh benchmarks/load_tools.sh http://127.0.0.1:8000 > benchmarks/results/load_tools.md
# Nothing but the installation needs a network: the tokenizer is the shipped one.
set -eu
url=$1
root=$(cd "$(dirname "$0")/.." && pwd)
tools=$root/.cache/load-tools
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

install() { # NAME VERSION; torch, where one is needed, is the build that the project has
    test -x "$tools/$1/bin/$1" && return
    "${PYTHON:-python3}" -m venv "$tools/$1"
    "$tools/$1/bin/python" -m pip install -qq --disable-pip-version-check -c "$root/constraints.txt" "$1==$2"
}
install guidellm 0.8.1
install aiperf 0.13.0

cd "$out"
"$tools/guidellm/bin/guidellm" run --disable-console --backend "kind=openai_http,target=$url,request_format=/v1/completions" \
    --tokenizer "kind=huggingface_auto,model=$root/models/target" --profile kind=concurrent,streams=2 \
    --data kind=synthetic_text,prompt_tokens=64,output_tokens=32 --constraint kind=max_requests,count=10 \
    --output kind=json,path=guidellm.json >guidellm.log 2>&1 || { cat guidellm.log >&2; exit 1; }
"$tools/aiperf/bin/aiperf" profile --model target --url "$url" --endpoint-type completions --streaming \
    --tokenizer "$root/models/target" --concurrency 2 --request-count 10 --isl 64 --osl 32 \
    --extra-inputs ignore_eos:true --artifact-dir aiperf --ui simple >aiperf.log 2>&1 || { cat aiperf.log >&2; exit 1; }

echo '`make load-tools`: 10 requests of 64 tokens for 32, two at a time; the shipped pair on a shared machine.'
echo
echo '## guidellm 0.8.1: requests that succeeded, and `response_metrics` of the first'
echo '```json'
"$tools/guidellm/bin/python" - <<'PYTHON'
import json
done = json.load(open("guidellm.json"))["benchmarks"][0]["requests"]
print(len(done["successful"]), "of", sum(len(each or ()) for each in done.values()))
print(json.dumps(done["successful"][0]["response_metrics"]))
PYTHON
echo '```'
echo
echo '## aiperf 0.13.0'
echo '```'
grep -E 'Usage Accepted|Acceptance|Accepted (per|drafts)|Spec Decode|Output Token Throughput|Time to First Token' aiperf.log | sed 's/ *$//'
echo '```'
