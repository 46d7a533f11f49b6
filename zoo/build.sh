#!/bin/sh
# Rebuild every model of the zoo on a CPU (about four hours on one quiet core).
#
# SCALE=0.01 makes every training that much shorter (a trial run of the whole recipe), TARGET
# writes all models to another folder than where they are shipped, OUT holds states and losses,
# ITEMS is the number of held-out items a task.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${OUT:-runs/zoo}
models=${TARGET:-zoo/models}
base=${TARGET:-src/radixlm/assets}/radix-tiny
items=${ITEMS:-200}
minutes() { awk "BEGIN { print $1 * ${SCALE:-1} }"; }

$python zoo/train.py --model base --minutes "$(minutes 75)" --out "$out/first"
$python zoo/train.py --model base --out "$out/first" --export-to "$out/first/export"
$python zoo/train.py --model base --minutes "$(minutes 45)" --out "$out/second" \
    --begun "$out/first/export" --rate 0.6 --seed 3
$python zoo/train.py --model base --out "$out/second" --export-to "$base"
$python zoo/train.py --model draft --minutes "$(minutes 30)" --out "$out/first" --teacher "$base"
$python zoo/train.py --model draft --out "$out/first" --export-to "$models/radix-tiny-draft"
$python zoo/lora.py --kind upper --minutes "$(minutes 4)" --base "$base" --out "$models"
$python zoo/lora.py --kind spanish --minutes "$(minutes 10)" --base "$base" --out "$models"
$python zoo/pooled.py --minutes "$(minutes 5)" --base "$base" --out "$models"
$python zoo/reward.py --minutes "$(minutes 12)" --base "$base" --out "$models"
$python zoo/eagle.py --minutes "$(minutes 8)" --base "$base" --out "$models"
$python zoo/vision.py --minutes "$(minutes 60)" --base "$base" --out "$models" --items "$items"
$python zoo/evaluate.py "$base" --items "$items"
$python zoo/speculation.py --base "$base" --draft "$models/radix-tiny-draft" --items "$items"
