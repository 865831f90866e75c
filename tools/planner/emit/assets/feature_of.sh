{% if features | length == 1 %}
feature_of() { echo any; }
{% else %}
feature_of() {
    local feature all
    all=,$(scontrol show node "$1" -o | grep -o 'ActiveFeatures=[^ ]*' | cut -d= -f2),
    for feature in {{ features | map("quote") | join(" ") }}; do
        [[ "$all" == *",$feature,"* ]] && { echo "$feature"; return; }
    done
    echo "error: node $1 has none of the features of this job" >&2
    return 1
}
{% endif %}
