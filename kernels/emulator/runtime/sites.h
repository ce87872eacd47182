// One record for each instruction and array that it accesses, and for each basic block.
#pragma once

#include <link.h>

#include "state.h"

static int find_text(dl_phdr_info* info, size_t, void*) {
    uint64_t here = reinterpret_cast<uint64_t>(&find_text);
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr)& part = info->dlpi_phdr[i];
        uint64_t base = info->dlpi_addr + part.p_vaddr;
        if (part.p_type != PT_LOAD || !(part.p_flags & PF_X) || here - base >= part.p_memsz) continue;
        state.load_address = info->dlpi_addr;
        state.text_base = base;
        state.text_bytes = part.p_memsz;
        return 1;
    }
    return 0;
}

static int find_shared(dl_phdr_info* info, size_t, void* result) {
    if (info->dlpi_addr != state.load_address) return 0;
    *static_cast<void**>(result) = info->dlpi_tls_data;
    return 1;
}

static bool reserve_sites() {
    if (state.site_of == nullptr) {
        if (!dl_iterate_phdr(find_text, nullptr)) return false;
        state.site_of = static_cast<uint16_t*>(calloc(state.text_bytes, sizeof(uint16_t)));
    }
    return state.site_of != nullptr;
}

// Where the site's region lies in this launch. A region that is too small for the access matches no
// address: its base is out of reach.
static void place_site(Site& site) {
    const Region& region = state.regions[site.counts.region + 1];
    uint64_t bytes = static_cast<uint64_t>(site.counts.bytes);
    bool fits = site.counts.kind != STEP && region.bytes >= bytes;
    site.base = fits ? region.base : ~0ull;
    site.limit = fits ? region.bytes - bytes : 0;
    site.shadow = state.shadows[site.counts.region + 1];
    site.shift = state.shifts[site.counts.region + 1];
}

static void clear_counts() {
    state.sites[NO_SITE].base = ~0ull;  // contains no address
    for (int i = 1; i <= state.num_sites; i++) {
        Site& site = state.sites[i];
        Counts& counts = site.counts;
        counts = {counts.pc, counts.kind, counts.bytes, counts.region, 0, 0, 0, 0, 0, 0, 0, 0};
        site.used = 0;
        place_site(site);
        memset(site.count, 0, sizeof site.count);
    }
}

static uint16_t new_site(uint64_t pc, Kind kind, int bytes, int region) {
    if (state.num_sites + 1 >= MAX_SITES) fail(NO_MEMORY);
    uint16_t index = static_cast<uint16_t>(++state.num_sites);
    Site& site = state.sites[index];
    memset(&site, 0, sizeof site);
    site.counts.pc = pc;
    site.counts.kind = kind;
    site.counts.bytes = bytes;
    site.counts.region = region - 1;
    place_site(site);
    uint16_t& first = state.site_of[pc - state.text_base];
    site.next = first;
    first = index;
    return index;
}

static void grow(Site& site) {
    uint32_t capacity = site.capacity ? 2 * site.capacity : 64;
    void* memory = site.counts.kind == STEP ? realloc(site.steps, capacity * sizeof(Step))
                                            : realloc(site.groups, capacity * sizeof(Group));
    if (memory == nullptr) fail(NO_MEMORY);
    if (site.counts.kind == STEP) site.steps = static_cast<Step*>(memory);
    else site.groups = static_cast<Group*>(memory);
    site.capacity = capacity;
}
