"""The engines need vLLM; `make vllm-check` runs them with a Python that has it."""

collect_ignore = ["__main__.py", "probe.py", "serve.py"]
