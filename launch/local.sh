#!/usr/bin/env bash
# Trains on this machine:  launch/local.sh CONFIG [KEY=VALUE]...
# Starts a private Ray for the run and removes it afterwards, even if RAY_ADDRESS is set.
set -euo pipefail
unset RAY_ADDRESS
here=$(cd "$(dirname "$0")/.." && pwd)
rlsys=$here/.venv/bin/rlsys
[ -x "$rlsys" ] || rlsys=rlsys # installed elsewhere, as in the images
exec "$rlsys" train "$@"
