#!/usr/bin/env bash
# Install the browser in which the report page is tested (Debian; Ubuntu has it as a snap only).  Does nothing
# where it is there already; says so and fails where it cannot be installed, and the tests are then skipped.
set -euo pipefail

have() { for name in chromium chromium-browser google-chrome; do command -v "$name" >/dev/null && return; done; return 1; }

if have; then
    echo "Chromium is installed"
    exit 0
fi
if ! command -v apt-get >/dev/null || [[ "$(id -u)" != 0 ]]; then
    echo "Chromium is not installed and needs apt-get as root; its tests will be skipped" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
have && echo "Chromium is installed"
