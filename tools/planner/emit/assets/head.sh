#!/bin/bash
# {{ note }}
# shellcheck disable=SC1091,SC2329  # args.sh is beside this file; functions are called by name
{% if signal %}
#SBATCH --job-name={{ options.job_name | quote }}
#SBATCH --time={{ options.time_limit | quote }}
#SBATCH --output={{ (options.run_dir ~ "/logs/%x-%j.out") | quote }}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:{{ signal }}@{{ options.notice_s }}
{% for words in requests %}
{% if not loop.first %}
#SBATCH hetjob
{% endif %}
#SBATCH {{ words | join(" ") }}
{% endfor %}
{% endif %}
set -euo pipefail
