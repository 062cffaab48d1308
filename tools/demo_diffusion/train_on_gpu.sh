#!/usr/bin/env bash
# Runs on the training machine, from the repository root, with demo-data/canvases.npz:
#   bash tools/demo_diffusion/train_on_gpu.sh OUT_FOLDER [MINUTES|smoke] [options of train.py]
# smoke: trains a tiny model on four canvases, on any CPU in three minutes.
set -euo pipefail
out=$1 minutes=${2:-4}
shift $(($# > 1 ? 2 : 1))
here=$(dirname "$0") python=${PYTHON:-python3}
options=(--minutes "$minutes")
[ "$minutes" = smoke ] && options=(
    --minutes 2 --shape smoke --batch 8 --canvases 4 --samples 1 --no-compile
)
export PYTHONWARNINGS=ignore PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader || true
"$python" "$here/train.py" "$out" "${options[@]}" "$@"
CUDA_VISIBLE_DEVICES= "$python" "$here/compare.py" "$out"
ls -l "$out"
