#!/usr/bin/env bash
# Runs steps 2 to 4 on the training machine, from the repository root, with demo-data/ beside src/:
#   bash tools/demo_model/train_on_gpu.sh OUT_FOLDER [full|pilot|smoke] [options of train.py]
# full: 150 s of teacher stories, then 15 minutes of training. pilot: the same in about 3 minutes,
# with timings of both kinds of attention. smoke: a tiny model on any CPU.
set -euo pipefail
out=$1 mode=${2:-full}
shift $(($# > 1 ? 2 : 1))
here=$(dirname "$0") work=${DEMO_WORK:-/tmp/demo-work}
rows=$work/rows-$mode corpus=$work/corpus
case $mode in
full) teacher_s=150 batch=8192 chats=3000000 options=(--minutes 15) ;;
pilot) teacher_s=1 batch=8192 chats=100000 options=(--minutes 0.7 --measured 15 --attention auto) ;;
smoke) teacher_s=1 batch=12 chats=2000 options=(--minutes 1 --measured 10 --shape smoke --batch 8 --attention sdpa --no-compile) ;;
*) echo "$mode is not a mode: use full, pilot or smoke"; exit 2 ;;
esac
rm -rf "$rows"
mkdir -p "$out" "$rows" "$corpus"
exec > >(tee "$out/train.log") 2>&1
began=$SECONDS
stamp() { echo "== $1, after $((SECONDS - began)) s"; }
export PYTHONWARNINGS=ignore TORCHINDUCTOR_CACHE_DIR=$work/inductor
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader || true
python=${PYTHON:-python3}
"$python" -c "import tarfile, sys; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='data')" \
    demo-data/text.tar.xz "$corpus"
stamp "texts unpacked"
"$python" "$here/data.py" "$corpus" "$rows" $chats & data=$!
"$python" "$here/teacher.py" "$rows" $teacher_s $batch
stamp "stories sampled"
wait $data
stamp "rows written"
cat "$rows"/sample-*.jsonl > "$out/stories.jsonl"
"$python" "$here/train.py" "$rows" "$corpus" "$out" "${options[@]}" "$@"
stamp "trained"
CUDA_VISIBLE_DEVICES= "$python" "$here/compare.py" "$out"
stamp "done"
