#!/bin/sh
# Rebuild every model of the zoo on a CPU (about two hours on one quiet core).
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${OUT:-runs/zoo}
base=src/radixlm/assets/radix-tiny
$python zoo/train.py --model base --minutes "${MINUTES:-90}" --out "$out"
$python zoo/train.py --model base --out "$out" --export-to $base
$python zoo/train.py --model draft --minutes 30 --out "$out" --teacher $base
$python zoo/train.py --model draft --out "$out" --export-to zoo/models/radix-tiny-draft
$python zoo/lora.py --kind upper --minutes 4
$python zoo/lora.py --kind spanish --minutes 10
$python zoo/pooled.py --kind embed --minutes 5
$python zoo/pooled.py --kind reward --minutes 8
$python zoo/eagle.py --minutes 8
$python zoo/vision.py --minutes 60
$python zoo/evaluate.py $base
$python zoo/speculation.py
