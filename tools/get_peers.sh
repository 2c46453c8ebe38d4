#!/usr/bin/env bash
# vLLM and FlashInfer for the benchmarks of a GPU machine without a network, into a folder: tools/get_peers.sh DIR
#
# It is made on a machine with x86-64 Linux, PyPI, g++ and unzip, and needs no GPU. Carry the folder (24 MB) to one with a Hopper
# GPU, Python 3.12, torch 2.11 for CUDA 13, its Triton, and transformers 5. There `eval "$(bash DIR/install.sh)"` installs
# nothing: it unpacks the folder in place, and prints the PYTHONPATH with which the benchmarks find the two.
set -euo pipefail
tools=$(dirname "$(realpath "$0")")
directory=$(realpath -m "$1")
python=3.12 # of the GPU machine, for what is compiled

work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
mkdir -p "$directory" "$work"/{wheels,lib}
cd "$work"
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Both for their Python alone. vLLM's samplers are Triton and torch; its other kernels are most of 336 MB.
python3 -m pip download -q --no-deps -d wheels --only-binary :all: --python-version $python \
    --platform manylinux_2_28_x86_64 vllm==0.33.0 flashinfer-python==0.7.4
unzip -q 'wheels/vllm-*.whl' 'vllm/*.py' '*/METADATA' -d lib
unzip -q 'wheels/flashinfer*.whl' 'flashinfer/*.py' '*/METADATA' -x 'flashinfer/data/*' -d lib
unzip -q 'wheels/flashinfer*.whl' 'flashinfer/data/*' -d source

# What their imports need that torch and transformers need not bring: pydantic checks vLLM's configurations, tvm-ffi loads
# FlashInfer's kernels and has the headers for them, and nvidia-ml-py (pynvml) is asked for the GPU.
python3 -m pip install -q --no-deps --target lib --only-binary :all: --python-version $python \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 \
    apache-tvm-ffi==0.1.11 nvidia-ml-py==13.615.71

# The rest are empty modules, and so is vLLM's of kernels, which its CUDA platform imports.
cp "$tools"/absent.py lib
sed -i '1i import absent' lib/{vllm,flashinfer}/__init__.py
touch lib/vllm/_C_stable_libtorch.py

# FlashInfer's sampling kernels, where it looks for one compiled ahead, by nvcc of the CUDA that torch 2.11 has, with the flags
# of flashinfer/jit. Of the runtime, torch has loaded the library before.
python3 -m pip install -q --no-deps --target cuda nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
    nvidia-cuda-runtime==13.0.96 nvidia-curand==10.4.0.35
cuda=cuda/nvidia/cu13 data=source/flashinfer/data
mkdir -p lib/flashinfer/data/aot/sampling
$cuda/bin/nvcc -shared -cudart none -gencode arch=compute_90a,code=sm_90a -o lib/flashinfer/data/aot/sampling/sampling.so \
    -std=c++17 -O3 -use_fast_math -DNDEBUG -Xcompiler -fPIC --expt-relaxed-constexpr -static-global-template-stub=false \
    -Xfatbin -compress-all --compress-mode=size -DFLASHINFER_ENABLE_{F16,BF16,FP8_E4M3,FP8_E5M2,FP8_E8M0,FP4_E2M1} -w \
    -I$data/{cccl/cub,cccl/libcudacxx/include,cccl/thrust} -Ilib/tvm_ffi/include -I$data/{include,csrc} \
    $data/csrc/{sampling,renorm,flashinfer_sampling_binding}.cu -L$cuda/lib -l:libcudart.so.13

tar -cJf "$directory"/peers.tar.xz -C lib .
cat > "$directory"/install.sh << 'END'
#!/usr/bin/env bash
# eval "$(bash DIR/install.sh)"
set -euo pipefail
here=$(dirname "$(realpath "$0")")
[ -d "$here"/lib ] || (python3 -m tarfile -e "$here"/peers.tar.xz "$here"/part && mv "$here"/part "$here"/lib) >&2
echo "export PYTHONPATH='$here/lib'\${PYTHONPATH:+:\$PYTHONPATH}"
END
du -sh "$directory"
