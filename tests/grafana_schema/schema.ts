// A file as Grafana's types want it, but for enumerations: JSON has their texts.
import type { Dashboard } from "@grafana/schema";
import type * as BarGauge from "@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen.js";
import type * as Stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.js";
import type * as StateTimeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.js";
import type * as StatusHistory from "@grafana/schema/dist/esm/raw/composable/statushistory/panelcfg/x/StatusHistoryPanelCfg_types.gen.js";
import type * as Table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen.js";
import type * as TimeSeries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.js";

export type Written<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends ReadonlyArray<infer E>
      ? Written<E>[]
      : T extends object
        ? { [K in keyof T]: Written<T[K]> }
        : T;

export type Whole = Written<Dashboard>;
export type Options = {
  bargauge: Written<Partial<BarGauge.Options>>;
  stat: Written<Partial<Stat.Options>>;
  "state-timeline": Written<Partial<StateTimeline.Options>>;
  "status-history": Written<Partial<StatusHistory.Options>>;
  table: Written<Partial<Table.Options>>;
  timeseries: Written<Partial<TimeSeries.Options>>;
};
export type Custom = {
  bargauge: Record<string, never>;
  stat: Record<string, never>;
  "state-timeline": Written<Partial<StateTimeline.FieldConfig>>;
  "status-history": Written<Partial<StatusHistory.FieldConfig>>;
  table: Written<Partial<Table.FieldConfig>>;
  timeseries: Written<Partial<TimeSeries.FieldConfig>>;
};
