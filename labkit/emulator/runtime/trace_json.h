// The trace as JSON for Python.
#pragma once
#include "trace.h"

static emu::text json;

static void json_string(const char* key, const emu::text& value)
{
    json.addf("\"%s\":\"", key);
    json.add_escaped(value.c_str());
    json += "\"";
}
static void json_samples(const AccessPoint& point)
{
    json += ",\"samples\":[";
    for (int i = 0; i < point.sample_count; i++) {
        const Sample& s = point.samples[i];
        json.addf("%s{\"block\":[%u,%u,%u],\"warp\":%d,\"offsets\":[", i ? "," : "", s.block.x, s.block.y,
                  s.block.z, s.warp);
        for (int lane = 0; lane < WARP; lane++) json.addf("%s%lld", lane ? "," : "", s.offset[lane]);
        json += "]}";
    }
    json += "]";
}
static void json_point(const AccessPoint& p)
{
    json.addf("{\"pc\":%llu,\"kind\":%d,\"size\":%u,\"space\":%d,", (unsigned long long)p.pc, p.kind, p.size,
              p.region->space);
    json_string("buf", p.region->name);
    json.addf(
        ",\"req\":%lld,\"lanes\":%lld,\"full\":%lld,\"bytes\":%lld,\"useful\":%lld,\"sectors\":%lld,"
        "\"lines\":%lld",
        p.requests, p.lanes, p.full_requests, p.bytes, p.useful_bytes, p.sectors, p.cache_lines);
    json.addf(",\"wave\":%lld,\"ideal\":%lld,\"maxdeg\":%d", p.wavefronts, p.ideal_wavefronts,
              p.worst_degree);
    json_samples(p);
    json += "}";
}
static void json_report(const Report& r)
{
    json.addf("{\"type\":\"%s\",\"pc1\":%llu,\"pc2\":%llu,\"t1\":%d,\"t2\":%d", r.type,
              (unsigned long long)r.pc, (unsigned long long)r.other_pc, r.thread, r.other_thread);
    json.addf(",\"block\":[%u,%u,%u],\"block2\":[%u,%u,%u],", r.block.x, r.block.y, r.block.z,
              r.other_block.x, r.other_block.y, r.other_block.z);
    json_string("region", r.region);
    json.addf(",\"off\":%lld,\"size\":%u,\"count\":%lld}", r.offset, r.size, r.count);
}

// kinds 0 read, 1 write, 2 atomic, 3 ldmatrix, 4 cp.async read, 5 cp.async write; space 1 shared, 3 global.
EMU_EXPORT const char* cuemu_trace_json()
{
    json = "{\"pcs\":[";
    const char* comma = "";
    for (uint32_t i = 1; i < point_count; i++) {
        const AccessPoint& point = point_at(i);
        if (point.kind == BASIC_BLOCK || !point.requests) continue;
        json += comma;
        json_point(point);
        comma = ",";
    }
    json += "],\"blocks\":[";
    comma = "";
    for (uint32_t i = 1; i < point_count; i++) {
        const AccessPoint& point = point_at(i);
        if (point.kind != BASIC_BLOCK || !point.requests) continue;
        json.addf("%s{\"pc\":%llu,\"req\":%lld,\"lanes\":%lld}", comma, (unsigned long long)point.pc,
                  point.requests, point.lanes);
        comma = ",";
    }
    json += "],\"regions\":[";
    comma = "";
    for (const Region* region : regions) {
        json += comma;
        json += "{";
        json_string("name", region->name);
        json.addf(",\"space\":%d,\"bytes\":%lld,\"block_sectors\":%lld,\"launch_sectors\":%lld}",
                  region->space, (long long)(region->high - region->low), region->block_sectors,
                  region->launch_sectors);
        comma = ",";
    }
    json += "],\"reports\":[";
    comma = "";
    for (const Report& report : reports) {
        json += comma;
        json_report(report);
        comma = ",";
    }
    json.addf("],\"events\":%lld,\"groups\":%lld,\"bb_groups\":%lld,\"bb_lanes\":%lld,\"pcs_used\":%u",
              event_count, request_count, basic_block_requests, basic_block_lanes, point_count);
    json.addf(",\"pcs_dropped\":%lld,\"reports_dropped\":%lld}", points_dropped, reports_dropped);
    return json.c_str();
}
