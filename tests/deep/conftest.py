"""The deep run needs tools that the other tests do not have; `make deep` installs them."""

collect_ignore = ["__main__.py", "mutants.py", "trial.py"]
