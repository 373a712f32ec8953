import subprocess
import sys

BLOCKED = ("torch", "ray", "vllm", "transformers")
IMPORT = f"""
import sys
for name in {BLOCKED}:
    sys.modules[name] = None  # importing it now raises ImportError
import tba, tba.config, tba.records, tba.cli, tba.doctor
"""


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_package_config_records_and_command_line_import_without_torch_ray_and_vllm():
    python(IMPORT)


def test_configuration_loads_and_is_described_without_torch():
    code = IMPORT + "print(tba.load_config(['arithmetic']).task.kind)"
    assert python(code) == "arithmetic\n"


def test_everything_in_the_public_api_exists():
    code = "import tba; print([name for name in tba.__all__ if not hasattr(tba, name)])"
    assert python(code) == "[]\n"


def test_train_stays_the_function_when_submodules_are_imported():
    assert python("import tba, tba.cli, tba.api; print(callable(tba.train))") == "True\n"
