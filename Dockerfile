# One image for CPUs and for NVIDIA's GPUs: PyTorch's own builds carry CUDA's libraries. For CPUs alone, give an index of CPU builds:
#   docker build -t burnish .
#   docker build -t burnish --build-arg TORCH_INDEX_URL=... .
#   docker run --rm --gpus all -v "$PWD:/work" burnish rl rl.yaml
# BASE is any image with Python 3.11 or newer and pip, and with gcc or apt-get: Triton compiles with gcc. pip reads PIP_INDEX_URL for all packages, where it is given.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL
ARG TORCH=torch==2.13.0
ARG EXTRAS=math,lora,view,liger
RUN command -v gcc || { apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; }
RUN pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$TORCH"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY burnish burnish
RUN pip install --no-cache-dir ".[$EXTRAS]"
WORKDIR /work
ENTRYPOINT ["burnish"]
