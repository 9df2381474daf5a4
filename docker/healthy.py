"""What an image's health check asks: whether rlsys can be called, and whether the head of a cluster, where one runs here, answers.

A run looks after its private Ray itself; that one chooses its port (0 in its command) and is not asked.
"""

import os
import subprocess
import sys

import psutil

subprocess.run(["rlsys", "--version"], check=True, stdout=subprocess.DEVNULL)
for process in psutil.process_iter(["name", "cmdline"]):
    if process.info["name"] == "gcs_server":
        said = dict(word.lstrip("-").partition("=")[::2] for word in process.info["cmdline"] or [])
        address = f"{said.get('node-ip-address')}:{said.get('gcs_server_port')}"
        if not address.endswith(":0"):
            mode = {"RAY_AUTH_MODE": process.environ().get("RAY_AUTH_MODE", "disabled")}
            sys.exit(subprocess.run(["ray", "health-check", "--address", address], env=os.environ | mode).returncode)
