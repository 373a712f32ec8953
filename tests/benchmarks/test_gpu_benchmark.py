import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_script_for_gpus_measures_every_part_at_a_small_size_on_a_cpu(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    script = str(ROOT / "benchmarks" / "gpu.sh")
    subprocess.run([script, str(tmp_path)], check=True, env=environment, timeout=280)
    results = json.loads((tmp_path / "results.json").read_text())
    for part in ("search, tokens/s", "training, response tokens/s", "publishing"):
        assert len(results[part]) >= 3
        assert all(figure > 0 for figure in results[part].values())
    assert set(results["recipe arithmetic"]) >= {"before sampled", "after sampled", "seconds"}
    assert (tmp_path / "report.md").read_text().count("|---|---|") == 4
