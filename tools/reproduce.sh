#!/usr/bin/env bash
# Makes files of results/ again: LANES side by side, the GROUPS of a lane one after the other.
#
#   tools/reproduce.sh [-n] [-s SECONDS] [-t FOLDER] [-k FOLDER] GPUS:GROUP,GROUP,… …
#   tools/reproduce.sh -s 3000 0:serving,operator 1:extrapolation 0,1:language_models
#
# -n  print the commands, run none       -s  stop after so many seconds: SIGTERM, and kill 20 s later
# -t  where files go (runs/results)      -k  keep a copy of what came so far there, without weights
#
# What is finished is not done again, and what was stopped goes on: say the same line once more.
# A corpus is built once, from texts in runs/prose (docs/how-to-train.md, 7), where a group needs one.
set -u
cd "$(dirname "$0")/.."

GROUPS_KNOWN="tests operator peers packed decode generation serving stages stick_breaking encodings directions
training distributed conversion corpus extrapolation routes language_models tasks"
DRY= SECONDS_LEFT=1000000 TO=runs/results KEEP=
while getopts ns:t:k: option; do
  case $option in
    n) DRY=1 ;; s) SECONDS_LEFT=$OPTARG ;; t) TO=$OPTARG ;; k) KEEP=$OPTARG ;;
    *) sed -n 2,12p "$0"; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { sed -n 2,12p "$0"; echo "groups: $GROUPS_KNOWN"; exit 2; }
PYTHON=${PYTHON:-python3}
PA=${PA:-$PYTHON -m path_attention.cli}
BEGUN=$(date +%s)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

left() { local n=$((SECONDS_LEFT - $(date +%s) + BEGUN)); echo $((n > 1 ? n : 1)); }
say() { echo "[$(($(date +%s) - BEGUN)) s] $*"; }

# run NAME COMMAND…: once, as far as the time goes; its words in TO/log/NAME
run() {
  local name=$1; shift
  if [ -n "$DRY" ]; then echo "$*"; return; fi
  [ -e "$TO/log/$name.done" ] && return
  [ "$(left)" -gt 1 ] || return
  say "$name begins"
  timeout --kill-after 20 --signal TERM "$(left)" bash -c "$*" >>"$TO/log/$name" 2>&1
  local code=$?
  [ $code -eq 0 ] && touch "$TO/log/$name.done"
  say "$name ends: $code"
}

# bench NAME FILE OPTIONS…: on the lane's first GPU
bench() {
  local name=$1 file=$2; shift 2
  run "$file" "CUDA_VISIBLE_DEVICES=${GPUS%%,*} $PA benchmark $name $* --out $TO/$file"
}

devices() { for n in ${GPUS//,/ }; do printf ' cuda:%s' "$n"; done; }

# several processes share a GPU well only through the multi-process service
share() {
  [ -n "$DRY" ] && return
  command -v nvidia-cuda-mps-control >/dev/null || return 0
  export CUDA_MPS_PIPE_DIRECTORY=$PWD/runs/mps CUDA_MPS_LOG_DIRECTORY=$PWD/runs/mps
  mkdir -p runs/mps
  pgrep -f "nvidia-cuda-mps-control -d" >/dev/null || nvidia-cuda-mps-control -d
}

corpus() {
  local packages include
  packages=$($PYTHON -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  include=$(readlink -f "${CUDA_HOME:-/usr/local/cuda}/include")
  (
    flock 9
    run corpus "$PA corpus build --sources runs/prose stdlib $packages $include \
--include '*.py' '*.pyi' '*.h' '*.hpp' '*.cuh' '*.text' --vocab-size 16384 --tokenizer-bytes 60000000 \
--heldout-fraction 0 --heldout 'site-packages/pandas/*' 'site-packages/sympy/*' 'site-packages/torch/testing/*' \
'prose/anarchism/sec[CFHI]*' --deduplicate --processes $(nproc) --out runs/corpus"
  ) 9>"${DRY:+/dev/null}${DRY:-runs/corpus.lock}"
}

group() {
  local heads64="--batch-tokens 16384 --heads 32" long="--tokens 4096,16384,32768 --memory-tokens 131072"
  local ours="--candidates sdpa_cudnn,sdpa_flash,triton --repeats 3"
  case $1 in
    tests) run gpu_tests "CUDA_VISIBLE_DEVICES=${GPUS%%,*} $PYTHON -m pytest -q -m gpu --results $TO/gpu_tests tests" ;;
    operator)
      bench operator operator_d64 "$long $heads64 --encodings path,path_fox,fox,nope $ours"
      bench operator operator_d128 "$long --batch-tokens 16384 --heads 16 --size 128 --encodings path,path_fox,fox,nope $ours"
      bench operator operator_grouped "--tokens 4096 $heads64 --key-heads 8 --size 128 --encodings path,path_fox $ours"
      ;;
    peers) bench operator operator_peers "--tokens 4096,16384,32768 $heads64 --encodings path,path_fox,fox,nope --repeats 2" ;;
    packed) bench packed packed "--candidates flash_varlen,triton --repeats 3" ;;
    decode | generation | training | conversion) bench "$1" "$1" "" ;;
    serving) bench serving serving "--rounds 1" ;;
    stages) bench stages operator_stages "" ;;
    stick_breaking | encodings) bench "$1" "$1" "--repeats 3" ;;
    directions) bench directions directions "" ;;
    distributed)
      run distributed "CUDA_VISIBLE_DEVICES=$GPUS torchrun --standalone --nproc-per-node $(tr ',' '\n' <<<"$GPUS" | wc -l) \
-m path_attention.cli benchmark distributed --fused --out $TO/distributed" ;;
    corpus) corpus ;;
    extrapolation)
      corpus; share
      run extrapolation "$PA extrapolation train --corpus runs/corpus --size small --fused --devices$(devices) --each 5"
      run extrapolation_report "$PA extrapolation report --to $TO/extrapolation"
      ;;
    routes)
      run routes "$PA analyze runs/extrapolation/*_seed0 --data runs/corpus --documents 'prose/*' \
--lengths 512,1024,2048,4096,8192,16384,32768,65536 --windows 2 --means --no-pages --device cuda:${GPUS%%,*} --out runs/extrapolation/routes" ;;
    language_models)
      corpus; share
      run language_models "$PA compare train --corpus runs/corpus \
--models rope path fox path_fox path_bounded --budget.fused --devices$(devices) --each 3"
      run language_models_report "$PA compare report --to $TO/language_models"
      ;;
    tasks)
      share
      run tasks "$PA task sweep --workers.devices$(devices) --workers.each 6"
      run tasks_report "$PA task report --to $TO/tasks"
      ;;
    *) echo "reproduce.sh: expected groups of: $GROUPS_KNOWN, got '$1'" >&2; exit 2 ;;
  esac
}

# everything but weights, corpora and locks, written whole
keep() {
  [ -n "$KEEP" ] || return 0
  mkdir -p "$KEEP"
  tar --exclude=checkpoints --exclude='*.safetensors' --exclude='*.lock' --exclude=tokenizer.json -cJf "$KEEP/.kept.$BASHPID" \
    "$TO" $(ls -d runs/extrapolation runs/language_models runs/tasks 2>/dev/null)
  [ $? -le 1 ] || { say "no copy in $KEEP: tar failed"; return 1; } # 1: a file grew meanwhile
  mv "$KEEP/.kept.$BASHPID" "$KEEP/results.tar.xz"
}

[ -n "$DRY" ] || mkdir -p runs "$TO/log"
lanes=()
for lane in "$@"; do
  (
    GPUS=${lane%%:*}
    for name in $(tr ',' ' ' <<<"${lane#*:}"); do group "$name"; done
  ) &
  lanes+=($!)
  [ -n "$DRY" ] && wait $!
done
if [ -n "$KEEP" ] && [ -z "$DRY" ]; then
  (while sleep 60; do keep; done) >/dev/null 2>&1 &
  keeper=$!
fi
code=0
for lane in "${lanes[@]}"; do wait "$lane" || code=$?; done
[ -n "${keeper:-}" ] && kill "$keeper" 2>/dev/null
[ -n "$DRY" ] || keep || code=1
[ -n "$KEEP" ] && rm -f "$KEEP"/.kept.* # of the one that was ended at work
exit $code
