"""`rlsys doctor`: checks this machine; with a configuration, also that engines and policy agree."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from launch.tools.doctor import software_checks, system_checks
from launch.tools.doctor.facts import MachineFacts, collect_facts
from launch.tools.doctor.results import CheckResult, print_results, to_json
from rlsys.config.schema import Config
from rlsys.runs.directory import write_user_file

CHECKS: tuple[Callable[[MachineFacts], list[CheckResult]], ...] = (
    *(software_checks.python, software_checks.libraries, software_checks.vllm),
    *(system_checks.gpus, software_checks.cuda, system_checks.topology, system_checks.cores, system_checks.memory),
    *(system_checks.shared_memory, system_checks.open_files, system_checks.tasks, system_checks.disk),
    *(system_checks.temp_dir, system_checks.network, system_checks.leftovers, system_checks.token),
    software_checks.compiler,
    software_checks.model,
)


def check_machine(json: str | None, console: Console) -> int:
    """Returns the exit code: 1 if something is wrong."""
    results = run_checks(collect_facts())
    if json:
        write_user_file(Path(json), to_json(results))
    return print_results(results, console)


def check_configuration(config: Config, console: Console) -> int:
    """Returns the exit code: 0 if engines and policy agree."""
    from launch.tools.doctor.agreement import check_agreement

    print_results(run_checks(collect_facts(config)), console, brief=True)
    return check_agreement(config, console)


def run_checks(facts: MachineFacts) -> list[CheckResult]:
    return [result for check in CHECKS for result in check(facts)]
