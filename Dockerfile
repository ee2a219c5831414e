# Everything that the recipes need, for CPUs: docker build -t lightning-commfree . && docker run --rm -it lightning-commfree
# For a job with more than one container: --network host, in a private network (SECURITY.md).
FROM python:3.12-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# git is for the commit that result pages name; any release of the two will do
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer/lightning-commfree

# libraries first, because they change less often than the code
COPY --chown=1000 pyproject.toml constraints.txt README.md LICENSE ./
COPY --chown=1000 lightning_commfree lightning_commfree
COPY --chown=1000 commfree_planner commfree_planner
RUN python -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -c constraints.txt -e '.[recipes]'

COPY --chown=1000 benchmarks benchmarks
COPY --chown=1000 conf conf
COPY --chown=1000 recipes recipes
ENV PATH=/home/trainer/lightning-commfree/.venv/bin:$PATH OMP_NUM_THREADS=1

CMD ["python", "-m", "recipes.pretrain", "experiment=demo"]
