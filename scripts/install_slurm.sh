#!/usr/bin/env bash
# Install the Slurm that the functional tests start on loopback (Debian and Ubuntu).  Does nothing where
# it is there already; says so and fails where it cannot be installed, and the tests are then skipped.
set -euo pipefail

have() { for tool in slurmctld slurmd sbatch; do command -v "$tool" >/dev/null || return 1; done; }

if have; then
    echo "Slurm is installed: $(slurmd -V)"
    exit 0
fi
if ! command -v apt-get >/dev/null || [[ "$(id -u)" != 0 ]]; then
    echo "Slurm is not installed and needs apt-get as root; its tests will be skipped" >&2
    exit 1
fi
apt-get update -qq
# RUNLEVEL=1 keeps the packages from starting system services.
RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
have && echo "Slurm is installed: $(slurmd -V)"
