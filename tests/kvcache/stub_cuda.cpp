// Stands for libcuda where there is no GPU: it prints what it is called with, as CUDA's header declares it. The
// variable STUB_FAILS names the call that fails; STUB_MANAGES 0 says that the device has no virtual memory management.

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <cuda.h>

namespace {

template <typename... Values>
void print(const char* format, Values... values) {
    FILE* const log = std::fopen(std::getenv("STUB_LOG"), "a");
    std::fprintf(log, format, values...);
    std::fclose(log);
}

CUresult result(const char* call) {
    const char* const fails = std::getenv("STUB_FAILS");
    return fails != nullptr && std::strcmp(fails, call) == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

void print_memory(const CUmemAllocationProp& prop) {
    print(" pinned %d handles %d device %d id %d meta %p flags %d %d %d", prop.type,
                 prop.requestedHandleTypes, prop.location.type, prop.location.id, prop.win32HandleMetaData,
                 prop.allocFlags.compressionType, prop.allocFlags.gpuDirectRDMACapable, prop.allocFlags.usage);
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned int flags) {
    print("cuInit %u\n", flags);
    return result("cuInit");
}

CUresult cuGetErrorName(CUresult error, const char** text) {
    if (error != CUDA_ERROR_OUT_OF_MEMORY) return CUDA_ERROR_INVALID_VALUE;
    *text = "CUDA_ERROR_OUT_OF_MEMORY";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    if (error != CUDA_ERROR_OUT_OF_MEMORY) return CUDA_ERROR_INVALID_VALUE;
    *text = "out of memory";
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    *device = 40 + ordinal;
    return result("cuDeviceGet");
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    const bool asked = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED && device == 43;
    const char* const manages = std::getenv("STUB_MANAGES");
    *value = asked && (manages == nullptr || *manages != '0');
    return result("cuDeviceGetAttribute");
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags option) {
    print("cuMemGetAllocationGranularity minimum %d", option == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    print_memory(*prop);
    print("%s", "\n");
    *granularity = size_t{2} << 20;
    return result("cuMemGetAllocationGranularity");
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    print("cuMemAddressReserve %zx %zx %llx %llx\n", size, alignment, hint, flags);
    *address = 0xfedc'ba98'0000'0000;
    return result("cuMemAddressReserve");
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    print("cuMemAddressFree %llx %zx\n", address, size);
    return result("cuMemAddressFree");
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
    print("cuMemCreate %zx", size);
    print_memory(*prop);
    print(" flags %llx\n", flags);
    *handle = 0x8765'4321'0fed'cba9;
    return result("cuMemCreate");
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    print("cuMemRelease %llx\n", handle);
    return result("cuMemRelease");
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    print("cuMemMap %llx %zx %zx %llx %llx\n", address, size, offset, handle, flags);
    return result("cuMemMap");
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t count) {
    print("cuMemSetAccess %llx %zx device %d id %d writes %d %zx\n", address, size,
                 access->location.type == CU_MEM_LOCATION_TYPE_DEVICE, access->location.id,
                 access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE, count);
    return result("cuMemSetAccess");
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    print("cuMemUnmap %llx %zx\n", address, size);
    return result("cuMemUnmap");
}
}
