#!/bin/sh
# Rebuild the models of the zoo on a CPU: all of them (about four hours on one quiet core), or the
# stages that are named, in this order: base draft lora embed reward eagle vision scores.
#
# FROM=src/radixlm/assets/radix-tiny goes on from that base, and from the shipped models where that
# is quicker, instead of from nothing. SCALE=0.01 makes every training that much shorter (a trial
# run of the whole recipe), TARGET writes all models to another folder than where they are shipped,
# OUT holds states and losses, ITEMS is the number of held-out items a task, THREADS of the decoders.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${OUT:-runs/zoo}
models=${TARGET:-zoo/models}
base=${TARGET:-src/radixlm/assets}/radix-tiny
items=${ITEMS:-200}
train="$python zoo/train.py --threads ${THREADS:-1}"

# minutes NEW ON: how long a stage takes from nothing, and where it goes on.
minutes() { awk "BEGIN { print ${SCALE:-1} * $([ "$FROM" ] && echo "$2" || echo "$1") }"; }
# begun NAME: go on from a shipped model.
begun() { [ -z "$FROM" ] || echo "--begun zoo/models/radix-tiny-$1"; }

stage_base() {
    if [ "$FROM" ]; then
        # What ships is the mean of where it began and of a long stage with a short one behind it.
        $train --minutes "$(minutes 0 92)" --out "$out/wide" --begun "$FROM" --rate 0.6 --seed 91
        $train --out "$out/wide" --export-to "$out/wide/mean" --mean-with "$FROM"
        $train --minutes "$(minutes 0 28)" --out "$out/fine" --begun "$out/wide/mean" \
            --rate 0.25 --seed 97
        $train --out "$out/fine" --export-to "$base" --mean-with "$FROM"
        return
    fi
    $train --minutes "$(minutes 75 0)" --out "$out/first"
    $train --out "$out/first" --export-to "$out/first/export"
    $train --minutes "$(minutes 45 0)" --out "$out/second" --begun "$out/first/export" \
        --rate 0.6 --seed 3
    $train --out "$out/second" --export-to "$base"
}
stage_draft() {
    mkdir -p "$out/draft" && cp "$base/tokenizer.json" "$out/draft/"
    $train --model draft --minutes "$(minutes 30 15)" --out "$out/draft" --teacher "$base" \
        $(begun draft)
    $train --model draft --out "$out/draft" --export-to "$models/radix-tiny-draft"
}
stage_lora() {
    $python zoo/lora.py --kind upper --minutes "$(minutes 4 2)" --base "$base" --out "$models" \
        $(begun lora-upper)
    $python zoo/lora.py --kind spanish --minutes "$(minutes 10 5)" --base "$base" --out "$models" \
        $(begun lora-spanish)
}
stage_embed() { $python zoo/pooled.py --minutes "$(minutes 5 5)" --base "$base" --out "$models"; }
stage_reward() {
    $python zoo/reward.py --minutes "$(minutes 12 6)" --base "$base" --out "$models" \
        $(begun reward)
}
stage_eagle() {
    $python zoo/eagle.py --minutes "$(minutes 8 4)" --base "$base" --out "$models" $(begun eagle3)
}
stage_vision() {
    $python zoo/vision.py --minutes "$(minutes 60 60)" --base "$base" --out "$models" \
        --items "$items"
}
stage_scores() {
    $python zoo/evaluate.py "$base" --items "$items"
    $python zoo/speculation.py --base "$base" --draft "$models/radix-tiny-draft" --items "$items"
}

for name in ${*:-base draft lora embed reward eagle vision scores}; do
    "stage_$name"
done
