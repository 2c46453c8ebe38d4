"""tests/fuzz.py on Intel's SPIR-V: python tests/intel/fuzz_intel.py --impl triton --batches 10000."""

import os

import fuzz
import runtime
from spec_verify_xpu.gpu import config

os.environ["TRITON_INTERPRET"] = "0"
for configurations in (config.CONFIGURATIONS, config.LOGITS):
    configurations["cpu"] = configurations["xpu"]
runtime.install()
fuzz.main()
