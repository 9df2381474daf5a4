#!/usr/bin/env bash
# Trains on this machine:  launch/local.sh CONFIG [KEY=VALUE]...
# A private Ray is started for the run and removed after it, also where RAY_ADDRESS is set.
set -euo pipefail
unset RAY_ADDRESS
exec "$(dirname "$0")/../.venv/bin/rlsys" train "$@"
