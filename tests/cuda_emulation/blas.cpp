// cuBLAS: products of matrices take as long as their operations or their bytes would on an H200, those of a
// batch as long as one of them.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

extern "C" int emulated_launch(void* stream, const char* name, double seconds);
extern "C" int emulated_forbidden(const char* what);

namespace {

constexpr double FLOPS = 650e12, BYTES_PER_SECOND = 4e12, LEAST = 1.5e-6;

struct Handle {
    cudaStream_t stream = nullptr;
    int math = 0, pointer = 0;
};

struct Layout {
    uint64_t rows, columns;
};

int multiply(cudaStream_t stream, const char* name, double m, double n, double k, double itemsize) {
    double computed = 2 * m * n * k / FLOPS, moved = itemsize * (m * k + k * n + m * n) / BYTES_PER_SECOND;
    return emulated_launch(stream, name, LEAST + std::max(computed, moved));
}

}  // namespace

API int cublasCreate_v2(Handle** made) {
    if (emulated_forbidden("cublasCreate")) return 1;
    *made = new Handle;
    return 0;
}
API int cublasDestroy_v2(Handle* handle) {
    delete handle;
    return 0;
}
API int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
    handle->stream = stream;
    return 0;
}
API int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
API int cublasGetMathMode(Handle* handle, int* mode) {
    *mode = handle->math;
    return 0;
}
API int cublasSetMathMode(Handle* handle, int mode) {
    handle->math = mode;
    return 0;
}
API int cublasGetPointerMode_v2(Handle* handle, int* mode) {
    *mode = handle->pointer;
    return 0;
}
API int cublasSetPointerMode_v2(Handle* handle, int mode) {
    handle->pointer = mode;
    return 0;
}

#define PRODUCT(name, itemsize)                                          \
    API int name(Handle* handle, int, int, int m, int n, int k, ...) {   \
        return multiply(handle->stream, #name, m, n, k, itemsize);       \
    }
PRODUCT(cublasGemmEx, 2)
PRODUCT(cublasGemmStridedBatchedEx, 2)
PRODUCT(cublasSgemmEx, 2)
PRODUCT(cublasSgemm_v2, 4)
PRODUCT(cublasSgemmStridedBatched, 4)

API int cublasLtMatmulDescCreate(char** made, int, int) {
    *made = new char[64];
    return 0;
}
API int cublasLtMatmulDescDestroy(char* made) {
    delete[] made;
    return 0;
}
API int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatrixLayoutCreate(Layout** made, int, uint64_t rows, uint64_t columns, int64_t) {
    *made = new Layout{rows, columns};
    return 0;
}
API int cublasLtMatrixLayoutDestroy(Layout* made) {
    delete made;
    return 0;
}
API int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulPreferenceCreate(char** made) { return cublasLtMatmulDescCreate(made, 0, 0); }
API int cublasLtMatmulPreferenceDestroy(char* made) { return cublasLtMatmulDescDestroy(made); }
API int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* found, int* number) {
    memset(found, 0, 64);
    *number = 1;
    return 0;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, Layout* a, const void*, Layout*, const void*,
                       const void*, void*, void*, Layout* d, const void*, void*, size_t, cudaStream_t stream) {
    double m = d->rows, n = d->columns;
    return multiply(stream, "cublasLtMatmul", m, n, double(a->rows) * a->columns / m, 2);
}
API size_t cublasLtGetVersion() { return 130100; }
