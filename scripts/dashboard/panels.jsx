// Draws the panels of a dashboard with Grafana's own components: what a panel's plugin does in
// Grafana, as far as the kinds of panels and options that the dashboard has.
//
// A plugin fills in what a dashboard's JSON leaves out; so does this, with the same values. An
// option that is not known here is an error: the picture would not be what Grafana shows.
import {
  applyFieldOverrides, createTheme, dateTime, FieldConfigOptionsRegistry, FieldType,
  getDisplayValueAlignmentFactors, getFieldDisplayValues, identityOverrideProcessor, toDataFrame,
} from "@grafana/data";
import {BarGauge, BigValue, GlobalStyles, PanelChrome, ThemeContext, TimeSeries, VizRepeater} from "@grafana/ui";
import {createRoot} from "react-dom/client";

const theme = createTheme({colors: {mode: "dark"}});
const CELL = 30, GAP = 8, COLUMNS = 24;
// Where none are given, from 80 on everything is red.
const THRESHOLDS = {mode: "absolute", steps: [{color: "green", value: -Infinity}, {color: "red", value: 80}]};
const NOTHING_GIVEN = {
  timeseries: {
    fields: {color: {mode: "palette-classic"}, mappings: [], thresholds: THRESHOLDS},
    custom: {
      drawStyle: "line", lineInterpolation: "linear", lineWidth: 1, fillOpacity: 0, gradientMode: "none",
      barAlignment: 0, barWidthFactor: 0.6, spanNulls: false, insertNulls: false, showPoints: "auto", pointSize: 5,
      stacking: {mode: "none", group: "A"}, axisPlacement: "auto", axisLabel: "", axisColorMode: "text",
      scaleDistribution: {type: "linear"}, axisCenteredZero: false, axisBorderShow: false, axisGridShow: true, axisSoftMin: undefined, axisSoftMax: undefined,
      hideFrom: {tooltip: false, viz: false, legend: false}, thresholdsStyle: {mode: "off"},
    },
    options: {legend: {showLegend: true, displayMode: "list", placement: "bottom", calcs: [], sortBy: undefined, sortDesc: undefined}, tooltip: {}},
  },
  stat: {
    fields: {color: {mode: "thresholds"}, mappings: [], thresholds: THRESHOLDS},
    options: {
      reduceOptions: {values: false, calcs: ["lastNotNull"], fields: ""}, orientation: "auto", textMode: "auto",
      wideLayout: true, colorMode: "value", graphMode: "area", justifyMode: "auto", showPercentChange: false,
      percentChangeColorMode: "standard",
    },
  },
  bargauge: {
    fields: {color: {mode: "thresholds"}, mappings: [], thresholds: THRESHOLDS},
    options: {
      reduceOptions: {values: false, calcs: ["lastNotNull"], fields: ""}, orientation: "auto", displayMode: "gradient",
      valueMode: "color", namePlacement: "auto", showUnfilled: true, sizing: "auto", minVizWidth: 8, minVizHeight: 16,
      maxVizHeight: 300, legend: {showLegend: false, displayMode: "list", placement: "bottom", calcs: []},
    },
  },
};

function isRecord(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

function filledIn(given, defaults, where) {
  if (!isRecord(given) || !isRecord(defaults)) return given;
  const all = {...defaults};
  for (const [name, value] of Object.entries(given)) {
    const open = where.endsWith("tooltip") || where.endsWith("color");
    if (!open && !(name in defaults)) throw new Error(`${where}.${name}: unknown to panels.jsx`);
    all[name] = filledIn(value, defaults[name], `${where}.${name}`);
  }
  return all;
}

// A panel as its plugin sees it.
function completed(panel) {
  const none = NOTHING_GIVEN[panel.type];
  if (!none) throw new Error(`${panel.title}: panels of type ${panel.type} are unknown to panels.jsx`);
  const {custom, ...fields} = panel.fieldConfig.defaults;
  const known = {unit: undefined, min: undefined, max: undefined, decimals: undefined, noValue: undefined, ...none.fields};
  const defaults = filledIn(fields, known, `${panel.title}.fieldConfig`);
  // JSON has no -Infinity.
  const steps = defaults.thresholds.steps.map(step => ({...step, value: step.value ?? -Infinity}));
  defaults.thresholds = {...defaults.thresholds, steps};
  if (none.custom) defaults.custom = filledIn(custom ?? {}, none.custom, `${panel.title}.custom`);
  return {
    fieldConfig: {defaults, overrides: panel.fieldConfig.overrides},
    options: filledIn(panel.options, none.options, `${panel.title}.options`),
  };
}

// What overrides may name; the values are taken as they stand in the JSON.
const OVERRIDABLE = new FieldConfigOptionsRegistry(() => [
  ...["unit", "min", "max", "decimals", "displayName", "color", "noValue", "mappings", "thresholds"].map(id => ({id, path: id})),
  ...Object.keys(NOTHING_GIVEN.timeseries.custom).map(path => ({id: `custom.${path}`, path, isCustom: true})),
].map(item => ({...item, name: item.id, process: identityOverrideProcessor, shouldApply: () => true})));

function frames(panel, fieldConfig) {
  const raw = panel.series.map(series => toDataFrame({
    refId: series.refId,
    fields: [
      {name: "Time", type: FieldType.time, config: {interval: panel.stepMs}, values: series.times},
      {
        name: "Value", type: FieldType.number, labels: series.labels, values: series.values,
        config: {displayNameFromDS: series.legend},
      },
    ],
  }));
  return applyFieldOverrides({
    data: raw, fieldConfig, theme, timeZone: "utc", replaceVariables: text => text, fieldConfigRegistry: OVERRIDABLE,
  });
}

function Content({panel, width, height, timeRange}) {
  const {fieldConfig, options} = completed(panel);
  const data = frames(panel, fieldConfig);
  if (!data.length) {
    return <div className="no-data" style={{width, height, display: "grid", placeItems: "center"}}>No data</div>;
  }
  if (panel.type === "timeseries") {
    return <TimeSeries frames={data} structureRev={1} timeRange={timeRange} timeZone="utc" width={width} height={height} legend={options.legend} options={options} />;
  }
  const getValues = () => getFieldDisplayValues({
    fieldConfig, reduceOptions: options.reduceOptions, replaceVariables: text => text, theme, data, timeZone: "utc",
    sparkline: panel.type === "stat" && options.graphMode !== "none",
  });
  const common = {getValues, width, height, source: data, orientation: options.orientation, renderCounter: 0};
  if (panel.type === "stat") {
    const draw = ({value, width, height, alignmentFactors, count}) => (
      <BigValue
        value={value.display} count={count} sparkline={value.sparkline} width={width} height={height} theme={theme}
        colorMode={options.colorMode} graphMode={options.graphMode} justifyMode={options.justifyMode}
        textMode={options.textMode} wideLayout={options.wideLayout} alignmentFactors={alignmentFactors}
      />
    );
    return <VizRepeater {...common} getAlignmentFactors={getDisplayValueAlignmentFactors} renderValue={draw} itemSpacing={3} autoGrid={true} />;
  }
  const draw = ({value, width, height, alignmentFactors, orientation}) => (
    <BarGauge
      value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)} text={options.text}
      width={width} height={height} theme={theme} orientation={orientation} displayMode={options.displayMode} itemSpacing={10}
      alignmentFactors={alignmentFactors} showUnfilled={options.showUnfilled} valueDisplayMode={options.valueMode}
      namePlacement={options.namePlacement}
    />
  );
  return (
    <VizRepeater
      {...common} getAlignmentFactors={getDisplayValueAlignmentFactors} renderValue={draw} itemSpacing={10}
      minVizWidth={options.minVizWidth} minVizHeight={options.minVizHeight} maxVizHeight={options.maxVizHeight}
    />
  );
}

window.drawDashboard = ({panels, from, to, width}) => {
  const timeRange = {from: dateTime(from), to: dateTime(to), raw: {from: "", to: ""}};
  const column = (width - GAP * (COLUMNS + 1)) / COLUMNS;
  const across = cells => cells * column + (cells - 1) * GAP, down = cells => cells * CELL + (cells - 1) * GAP;
  const bottom = Math.max(...panels.map(({gridPos: at}) => at.y + at.h));
  const place = ({gridPos: at}) => ({
    position: "absolute", left: GAP + at.x * (column + GAP), top: GAP + at.y * (CELL + GAP),
  });
  createRoot(document.getElementById("dashboard")).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{position: "relative", width, height: down(bottom) + 2 * GAP, background: theme.colors.background.canvas}}>
        {panels.map(panel => (
          <div key={panel.id} style={place(panel)}>
            <PanelChrome title={panel.title} description={panel.description} width={across(panel.gridPos.w)} height={down(panel.gridPos.h)}>
              {(innerWidth, innerHeight) => <Content panel={panel} width={innerWidth} height={innerHeight} timeRange={timeRange} />}
            </PanelChrome>
          </div>
        ))}
      </div>
    </ThemeContext.Provider>,
  );
};
