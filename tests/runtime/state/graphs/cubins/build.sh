#!/bin/sh
# Makes the committed cubins, and a compressed fat binary, from the .cu files. nvcc 13.0 comes from PyPI:
#   pip install nvidia-cuda-nvcc==13.0.* nvidia-cuda-crt==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.*
set -eu
cd "$(dirname "$0")"
for name in toy_a toy_b toy_c toy_d; do
  "${NVCC:-nvcc}" -arch=sm_90 -O1 -cubin "$name.cu" -o "$name.cubin"
done
"${NVCC:-nvcc}" -arch=sm_90 -O1 -DVARIANT=5 -cubin toy_e.cu -o toy_e.cubin
"${NVCC:-nvcc}" -arch=sm_90 -O1 -DVARIANT=6 -cubin toy_e.cu -o toy_f.cubin
"${NVCC:-nvcc}" -arch=sm_90 -O1 -cubin toy_g.cu -o toy_g.cubin
"${NVCC:-nvcc}" -arch=sm_90 -O1 -DFLAG -cubin toy_g.cu -o toy_h.cubin
"${NVCC:-nvcc}" -gencode arch=compute_90,code=sm_90 -gencode arch=compute_100,code=sm_100 -O1 -Xfatbin -compress-all -fatbin toy_a.cu -o toy_packed.fatbin
