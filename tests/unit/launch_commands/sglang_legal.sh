#!/bin/bash
# Modelled on sglang docs/basic_usage/deepseek_v32.md at 7bc99464: DP attention within the tensor-parallel group.
python3 -m sglang.launch_server \
  --model-path deepseek-ai/DeepSeek-V4-Flash --trust-remote-code \
  --tp 8 --dp 8 --enable-dp-attention --ep-size 8 \
  --quantization fp8 --mem-fraction-static 0.8 --max-running-requests 64 \
  --host 0.0.0.0 --port 30000
